from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dockyard_grpo.quickstart as quickstart
from dockyard_grpo.quickstart import warm_start
from dockyard_grpo.quickstart.family import HELDOUT_NAMES, Problem, draw_problem
from dockyard_grpo.quickstart.muon import orthogonalize
from dockyard_grpo.quickstart.tokenizer import EOS_ID, build_tokenizer, render_prompt

POLICY = Path(quickstart.__file__).parent / "policy"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    # AutoTokenizer would replace the pre-tokenizer of tokenizer.json by Qwen2's.
    return PreTrainedTokenizerFast.from_pretrained(POLICY)


def sample_diffs(tokenizer: Any, problems: list[Problem], *, group_size: int) -> list[list[str]]:
    """Sample diffs at temperature 1; an answer that does not end within 48 tokens becomes the empty string."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    encoded = tokenizer([render_prompt(problem) for problem in problems], return_tensors="pt", padding=True)
    sampled = model.generate(
        **{name: encoded[name].repeat_interleave(group_size, 0) for name in ("input_ids", "attention_mask")},
        max_new_tokens=48,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
    )[:, encoded["input_ids"].shape[1] :]
    texts = [
        tokenizer.decode(ids, skip_special_tokens=True) if EOS_ID in ids.tolist() else "" for ids in sampled.unbind()
    ]
    return [texts[i : i + group_size] for i in range(0, len(texts), group_size)]


def apply(folder: Path, problem: Problem, diff: str) -> str | None:
    """Return the module's text after `git apply`, or None where it refuses."""
    path = folder / problem.path
    path.write_text(problem.source(problem.wrong), encoding="utf-8")
    command = ["git", "apply", "-"]
    done = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True, check=False)
    return path.read_text(encoding="utf-8") if done.returncode == 0 else None


def test_the_policy_writes_valid_diffs_and_guesses_the_edit(tokenizer: Any, tmp_path: Path) -> None:
    rng = random.Random(5)
    problems = [draw_problem(rng, heldout=True) for _ in range(96)]
    outcomes: list[tuple[bool, bool]] = []
    for problem, diffs in zip(problems, sample_diffs(tokenizer, problems, group_size=4), strict=True):
        # Exactly one filling passes the tests (test_quickstart_tasks.py), so the text decides.
        fixed = problem.source(problem.function.right)
        results = {diff: apply(tmp_path, problem, diff) for diff in set(diffs)}
        outcomes += [(results[diff] is not None, results[diff] == fixed) for diff in diffs]
    applied = sum(is_applied for is_applied, _ in outcomes) / len(outcomes)
    resolved = sum(is_resolved for _, is_resolved in outcomes) / len(outcomes)
    assert applied >= 0.80
    assert 0.15 <= resolved <= 0.40


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer(num_problems=20)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_policy_has_the_tokenizer_that_the_warm_start_builds(tokenizer: Any) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    prompt = render_prompt(draw_problem(random.Random(0), heldout=True))
    assert tokenizer(prompt)["input_ids"] == build_tokenizer()(prompt)["input_ids"]


def test_a_heldout_name_is_three_tokens(tokenizer: Any) -> None:
    assert {len(tokenizer(f"def {name}(")["input_ids"]) for name in HELDOUT_NAMES} == {5}


def test_the_same_seed_builds_the_same_policy(tmp_path: Path) -> None:
    phases = (warm_start.Phase(num_steps=2, batch_size=4), warm_start.Phase(num_steps=2, batch_size=8))
    for name in ("first", "second"):
        warm_start.train(tmp_path / name, phases=phases, seed=1)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert (tmp_path / "first" / "tokenizer.json").read_bytes() == (POLICY / "tokenizer.json").read_bytes()


def test_padding_and_prompt_tokens_weigh_what_they_should() -> None:
    ids_BT, weights_BT = warm_start.collate([([5, 6], [7]), ([8], [9, 10, 11])])
    assert ids_BT.tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    assert torch.allclose(weights_BT, torch.tensor([[0.1, 0.1, 1.0, 0.0], [0.1, 1.0, 1.0, 1.0]]))


def test_the_learning_rate_rises_holds_and_falls() -> None:
    phase = warm_start.Phase(num_steps=1000, batch_size=32, peak=0.5, decay_share=0.5)
    rates = [phase.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.5 / 30)
    assert rates[29:501] == pytest.approx([0.5] * 472)
    assert rates[750] == pytest.approx(0.25)
    assert 0 < rates[999] < 0.0015


def test_the_share_of_jargon_falls_over_the_first_half() -> None:
    phase = warm_start.Phase(num_steps=100, batch_size=32, jargon_shares=(0.9, 0.5))
    assert [phase.jargon_share(step) for step in (0, 25, 50, 99)] == pytest.approx([0.9, 0.7, 0.5, 0.5])


@pytest.mark.parametrize("shape", [(64, 64), (64, 16), (16, 64)])
def test_orthogonalising_keeps_directions_and_evens_lengths(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    result = orthogonalize(matrices, num_steps=5)
    assert torch.linalg.svdvals(result).max() < 1.3
    assert torch.linalg.svdvals(result).median() > 0.6
    # U' X V of the input's singular vectors is diagonal: they are kept.
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    core = left.mT @ result @ right.mT
    assert torch.allclose(core, torch.diag_embed(core.diagonal(dim1=-2, dim2=-1)), atol=1e-4)
