"""The law of the loop's period against a schedule worked out step by step, and the engine that measures it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dockyard_grpo
from benchmarks.latency_engine import Latency, LatencyGenerator, length_of
from benchmarks.loop_period import CASES, RESULTS, WARM_UP_STEPS, law, summarize, table
from dockyard_core.errors import ConfigError
from dockyard_core.generator import Completion, GenerateRequest, SamplingParams, VersionSpan

POLICY = Path(dockyard_grpo.__file__).parent / "quickstart" / "policy"


def schedule(
    generate_s: float, train_s: float, refit_s: float, max_staleness: int, num_steps: int, driver_s: float = 0.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a run with fixed durations: the batch of step k starts when step k − S − 1 has ended."""
    metrics: list[dict[str, Any]] = []
    ends = [0.0]
    for step in range(1, num_steps + 1):
        is_there = ends[max(0, step - max_staleness - 1)] + generate_s
        started = max(ends[-1], is_there)
        ends.append(started + train_s + refit_s + driver_s)
        metrics.append(
            {
                "step": step,
                "wall_s": ends[-1],
                "step_s": ends[-1] - ends[-2],
                "time_train_s": train_s,
                "time_refit_s": refit_s,
                "time_wait_s": started - ends[-2],
                "staleness_max": max_staleness,
                "dropped": {},
            }
        )
    rollouts = [
        {"step": row["step"], "timings_s": {"generate": generate_s * share, "judge": 0.0}}
        for row in metrics
        for share in (0.5, 1.0)
    ]
    return metrics, rollouts


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("generate_s", [0.05, 0.4, 2.0])
def test_the_law_is_that_of_the_schedule(max_staleness: int, generate_s: float) -> None:
    metrics, rollouts = schedule(generate_s, 0.07, 0.05, max_staleness, WARM_UP_STEPS + 30)
    found = summarize(metrics, rollouts, max_staleness)
    assert found["ratio"] == pytest.approx(1, abs=1e-3)
    assert found["overhead"] == pytest.approx(0, abs=1e-3)
    assert (found["G_s"], found["T_s"], found["F_s"]) == (generate_s, 0.07, 0.05)


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_what_the_driver_adds_to_a_step_is_overhead(max_staleness: int) -> None:
    metrics, rollouts = schedule(0.4, 0.07, 0.05, max_staleness, WARM_UP_STEPS + 30, driver_s=0.03)
    found = summarize(metrics, rollouts, max_staleness)
    expected = 0.03 / 0.55 if max_staleness == 0 else 0.03 / 0.15
    assert found["overhead"] == pytest.approx(expected, abs=1e-3)
    assert found["driver_s"] == pytest.approx(0.03, abs=1e-3)


def test_the_recorded_results_keep_the_law() -> None:
    results = json.loads(RESULTS.read_text())
    assert list(results["cases"]) == list(CASES)
    for case in results["cases"].values():
        expected = law(case["G_s"], case["T_s"], case["F_s"], case["max_staleness"])
        assert case["law_s"] == pytest.approx(expected, rel=0.05)
        assert case["ratio"] == pytest.approx(1, abs=0.05)
        assert case["steps"] >= 20
        assert case["dropped"] == {}
        assert case["staleness_max"] <= case["max_staleness"]
    assert table(results).count("\n") == len(CASES) + 1


def test_one_request_in_so_many_is_a_straggler() -> None:
    latency = Latency.from_environment(
        {"DOCKYARD_LATENCY_S": "0.5", "DOCKYARD_LATENCY_PER_TOKEN_S": "0.1", "DOCKYARD_LATENCY_STRAGGLER_EVERY": "3"}
    )
    assert [latency.seconds(number, 5) for number in range(1, 8)] == [1, 1, 50, 1, 1, 50, 1]
    assert Latency.from_environment({}) == Latency()


def test_a_length_is_chosen_by_identity_and_every_length_is() -> None:
    chosen = [length_of(f"task#{group}", index, (4, 9, 30)) for group in range(40) for index in range(2)]
    assert set(chosen) == {4, 9, 30}
    assert length_of("task#7", 1, (4, 9, 30)) == chosen[15]


async def _complete(values: Mapping[str, Any], prompt: tuple[int, ...]) -> tuple[list[Completion], list[float]]:
    generator = LatencyGenerator(values)
    await generator.start()

    async def timed(index: int) -> tuple[Completion, float]:
        started = time.monotonic()
        request = GenerateRequest(
            request_id=f"run/task#0/{index}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(stop_token_ids=(1,)),
            group_id="task#0",
        )
        return await generator.generate(request), time.monotonic() - started

    try:
        answers = await asyncio.gather(timed(0), timed(1))
        with pytest.raises(ConfigError, match="temperature 1"):
            await generator.generate(
                GenerateRequest(
                    request_id="g/0", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.5), group_id="g"
                )
            )
        return [completion for completion, _ in answers], [seconds for _, seconds in answers]
    finally:
        await generator.shutdown()


def test_a_completion_carries_the_logprobs_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("DOCKYARD_LATENCY_S", "0.3")
    monkeypatch.setenv("DOCKYARD_LATENCY_TOKENS", "8,13")
    prompt = (5, 9, 7, 11, 6)
    values = {"model": str(POLICY), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "seed": 0}
    completions, seconds = asyncio.run(_complete({**values, "device": "cpu"}, prompt))
    assert min(seconds) >= 0.3
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    for index, completion in enumerate(completions):
        length = length_of("task#0", index, (8, 13))
        assert len(completion.token_ids) == length
        assert completion.token_ids[-1] == 1
        assert completion.version_spans == (VersionSpan(0, 0, length),)
        assert completion.finish_reason == "stop"
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[-length:, 0]
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)
