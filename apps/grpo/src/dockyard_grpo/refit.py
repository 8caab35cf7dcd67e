"""The driver's side of a refit: fence, send, attest, probe."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dockyard_core import RefitError
from dockyard_core.loop import LoopMachine
from dockyard_core.refit import ProbeDiff, RefitReport, RefitUpdate, elements_per_layer, probe_diff
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets


class RefitCoordinator:
    """Brings every engine to the trainer's version, and proves it."""

    def __init__(self, config: Config, fleets: Fleets) -> None:
        self._config = config
        self._fleets = fleets
        self._probes: Sequence[Sequence[int]] = ()
        self._elements = elements_per_layer(fleets.manifest)
        self.incarnation = 0

    async def prepare(self, version: int) -> ProbeDiff:
        """Choose the probe tokens and compare both sides at the version they start with."""
        engine = next(iter(self._fleets.engines.values()))
        refit = self._config.refit
        num_tokens = min(refit.probe_tokens, self._config.generation.max_model_len - 1)
        self._probes = await engine.probes.remote(refit.num_probes, num_tokens)
        return await self.probe(version)

    async def refit(self, machine: LoopMachine) -> None:
        """One transaction over all late engines. Raises RefitError naming who does not hold the version."""
        version = machine.policy_version
        update = RefitUpdate(
            policy_version=version,
            incarnation=self.incarnation,
            manifest=self._fleets.manifest,
            bucket_bytes=self._config.refit.bucket_mib << 20,
            timeout_s=self._config.refit.timeout_s,
        )
        late = machine.begin_refit()
        receiving = [self._fleets.engines[name].refit.remote(update) for name in late]
        sending = [trainer.send_weights.remote(update) for trainer in self._fleets.trainers]
        reports: list[RefitReport]
        reports, _ = await asyncio.gather(asyncio.gather(*receiving), asyncio.gather(*sending))
        for name, report in zip(late, reports, strict=True):
            self._check_counts(name, report)
            machine.attest(name, report.policy_version)
        machine.end_refit()

    async def probe(self, version: int) -> ProbeDiff:
        """Score the probes on both sides at ``version``; the trainer must not step meanwhile."""
        trainer_sides, engine_sides = await asyncio.gather(
            asyncio.gather(*(trainer.probe.remote(self._probes) for trainer in self._fleets.trainers)),
            asyncio.gather(*(engine.score.remote(self._probes) for engine in self._fleets.engines.values())),
        )
        diffs = [probe_diff(engine_side, trainer_sides[0]) for engine_side in engine_sides]
        worst = max(diffs, key=lambda diff: diff.abs_diff_mean)
        allowed = self._config.max_probe_abs_diff
        if worst.abs_diff_mean > allowed:
            raise RefitError(
                f"the probe differs by {worst.abs_diff_mean:.2e} nats on average, allowed {allowed:.0e}",
                wanted_version=version,
            )
        return ProbeDiff(
            worst.abs_diff_mean, max(diff.abs_diff_max for diff in diffs), sum(diff.num_tokens for diff in diffs)
        )

    def _check_counts(self, name: str, report: RefitReport) -> None:
        if dict(report.elements_per_layer) != self._elements:
            raise RefitError(
                f"{name} loaded other element counts per layer than were sent", wanted_version=report.policy_version
            )
