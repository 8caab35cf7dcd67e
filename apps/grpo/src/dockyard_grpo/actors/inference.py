"""One engine of the inference fleet, with the agents whose prompts it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property

from dockyard_core import GroupId, RolloutGroup, SamplingParams, Task
from dockyard_core.agent import PatchAgent
from dockyard_core.prompt import build_prompt
from dockyard_core.refit import RefitEndpoint, RefitReport, RefitUpdate
from dockyard_grpo import compose
from dockyard_grpo.config import Config
from dockyard_grpo.rollout_worker import RolloutWorker, SandboxFleet
from dockyard_grpo.seams import Engine
from dockyard_grpo.summary import GroupSummary, summarize
from dockyard_grpo.throttle import Throttle, ThrottledGenerator, ThrottledSandbox
from dockyard_grpo.tokenizer import HuggingFaceTokenizer
from dockyard_grpo.usage import BusyClock, EngineUsage

_SANDBOX_LIMIT = 16, 48
"""Verdicts asked for at once, at first and at most: beyond that the client's connections cost more than they carry."""
_MOST_REQUESTS = 4
"""Requests to an engine at once, at most, as a multiple of what it decodes at once."""


class InferenceWorker:
    """Engine, tokenizer, agents and sandbox clients of one replica."""

    def __init__(
        self,
        config: Config,
        train: Sequence[Task],
        validation: Sequence[Task],
        *,
        engine_index: int,
        sandbox_urls: Sequence[str],
        sandbox_token: str | None,
        attempt: str,
    ) -> None:
        self._config = config
        self._tasks = {"train": tuple(train), "validation": tuple(validation)}
        self._engine_index = engine_index
        self._attempt = attempt
        self._sandbox_urls = tuple(sandbox_urls)
        self._sandbox_token = sandbox_token
        self._generator: Engine | None = None
        self._sandbox: SandboxFleet | None = None
        self._workers: dict[str, RolloutWorker] = {}
        self._generating = BusyClock()

    async def start(self) -> int:
        """Check every prompt, then start the engine; returns the number of its worker ranks in a refit.

        Raises DataError for a task whose prompt cannot fit the token budget.
        """
        agents = {
            "train": self._build_agent(self._config.generation.temperature),
            "validation": self._build_agent(self._config.evaluation.temperature),
        }
        for split, agent in agents.items():
            for task in self._tasks[split]:
                agent.prompt(task)
        self._generator = await compose.start_generator(self._config, engine_index=self._engine_index)
        attempt, are_ours = f"{self._attempt}/{self._engine_index}", self._config.sandbox.url is None
        self._sandbox = SandboxFleet(self._clients(self._sandbox_urls), attempt, are_ours=are_ours)
        at_once = self._config.generation.max_num_seqs
        throttle = Throttle(at_once, maximum=_MOST_REQUESTS * at_once)  # one, whoever asks
        generator = ThrottledGenerator(self._generator, throttle, self._generating)
        for split, agent in agents.items():
            self._workers[split] = RolloutWorker(
                agent=agent,
                generator=generator,
                sandbox=self._sandbox,
                reward=self._config.reward,
                max_new_tokens=self._config.generation.max_new_tokens,
                timeout_s=self._config.grpo.rollout_timeout_s,
            )
        return self._config.generation.num_workers

    async def run_group(
        self, split: str, index: int, group_id: GroupId, num_rollouts: int
    ) -> tuple[GroupSummary, RolloutGroup]:
        """Run a group; the summary goes to the driver, the tokens stay in the object store."""
        group = await self._workers[split].run_group(self._tasks[split][index], group_id, num_rollouts)
        return summarize(group), group

    async def use_sandboxes(self, urls: Sequence[str]) -> None:
        """From now on ask these servers for verdicts."""
        if self._sandbox is not None:
            self._sandbox.use(self._clients(urls))

    async def usage(self) -> EngineUsage:
        """How busy the engine and the sandboxes were for it, since it started."""
        work_s = self._sandbox.work_s if self._sandbox is not None else 0.0
        return EngineUsage(generate_busy_s=self._generating.total_s, sandbox_work_s=work_s)

    async def probes(self, count: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Given token sequences for the same-version probe: the heads of the first prompts."""
        probes = []
        for index in range(count):
            task = self._tasks["train"][index % len(self._tasks["train"])]
            prompt = build_prompt(task, template=self._config.data.prompt_template, tokenizer=self._tokenizer)
            tokens = self._tokenizer.encode(prompt + (task.gold_patch or "")) or [self._tokenizer.eos_token_id]
            start = (index // len(self._tasks["train"])) * num_tokens
            window = (tokens * (1 + (start + num_tokens) // len(tokens)))[start : start + num_tokens]
            probes.append(tuple(window))
        return tuple(probes)

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group."""
        await self._engine.connect_refit(endpoint)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take new weights in flight."""
        return await self._engine.refit(update)

    async def score(self, probes: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Logprobs at temperature 1 of tokens 1.. of each probe."""
        return tuple(await asyncio.gather(*(self._engine.score(probe) for probe in probes)))

    async def stop(self) -> None:
        """End the engine and its processes."""
        if self._generator is not None:
            await self._generator.shutdown()

    @cached_property
    def _tokenizer(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(compose.model_path(self._config))

    @property
    def _engine(self) -> Engine:
        assert self._generator is not None, "start() comes first"
        return self._generator

    def _clients(self, urls: Sequence[str]) -> list[ThrottledSandbox]:
        initial, maximum = _SANDBOX_LIMIT
        return [
            ThrottledSandbox(
                compose.build_sandbox_client(self._config, url, self._sandbox_token),
                Throttle(initial, maximum=maximum),
                timeout_s=self._config.sandbox.timeout_s,
            )
            for url in urls
        ]

    def _build_agent(self, temperature: float) -> PatchAgent:
        section = self._config.generation
        sampling = SamplingParams(
            temperature=temperature,
            max_new_tokens=section.max_new_tokens,
            stop_token_ids=(self._tokenizer.eos_token_id,),
            seed=self._config.run.seed if section.per_request_seeds else None,
        )
        return PatchAgent(
            self._tokenizer,
            sampling=sampling,
            prompt_template=self._config.data.prompt_template,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )
