"""The driver's side of a refit: fence, send, attest, probe; what fails rolls forward."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dockyard_core import EngineDead, GeneratorError, RefitCalledOff, RefitError
from dockyard_core.loop import LoopMachine
from dockyard_core.refit import Hashes, ProbeDiff, RefitReport, RefitUpdate, elements_per_layer, probe_diff
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.recovery import Recovery

_MAX_TRIES = 3
_MAX_HASHED_BYTES = 8 << 30
"""Weights of more bytes are hashed in samples, unless the configuration says otherwise."""
_GRACE_S = 60.0
"""An engine has deadlines of its own; one that says nothing for so much longer is dead."""


class RefitCoordinator:
    """Brings every engine to the trainer's version, and proves it.

    A try that fails is repeated with the engines that are late, over a transport of their own;
    engines that have attested keep what they hold. An engine that fails time and again is restarted.
    """

    def __init__(self, config: Config, fleets: Fleets, recovery: Recovery) -> None:
        self._config = config
        self._fleets = fleets
        self._recovery = recovery
        self._probes: Sequence[Sequence[int]] = ()
        self._elements = elements_per_layer(fleets.manifest)
        self._members: tuple[str, ...] = tuple(fleets.engines)
        self._failures: Counter[str] = Counter()
        self.incarnation = 0

    async def prepare(self, version: int) -> ProbeDiff | None:
        """Choose the probe tokens and compare both sides at the version they start with."""
        engine = next(iter(self._fleets.engines.values()))
        refit = self._config.refit
        num_tokens = min(refit.probe_tokens, self._config.generation.max_model_len - 1)
        self._probes = await engine.probes.remote(refit.num_probes, num_tokens)
        return await self.probe(version)

    async def refit(self, machine: LoopMachine) -> None:
        """Try until no engine that is alive is late; the trainer must not step meanwhile.

        Raises RefitError when an engine that is alive still refuses the version after several tries.
        """
        while set(machine.refit.late_engines) & self._recovery.available:
            await self._try(machine)

    async def _try(self, machine: LoopMachine) -> None:
        late = machine.begin_refit(self._recovery.available)
        handles = {name: self._fleets.engines[name] for name in late}
        try_number = machine.refit.try_number
        self._recovery.begin_refit(late, aborts=self._config.refit.mode == "abort")
        reports, sent = await self._transfer(machine.policy_version, handles)
        for name, report in reports.items():
            # One that died after it reported is lost already, and what it said counts for nothing.
            is_there = name in self._recovery.available and self._fleets.engines[name] is handles[name]
            if isinstance(report, RefitReport) and is_there:
                machine.attest(name, report.policy_version, try_number=try_number)
                self._failures[name] = 0
                self._recovery.attested(name)
        machine.end_refit()
        failed = {name: report for name, report in reports.items() if not isinstance(report, RefitReport)}
        if failed:
            self._members = ()  # whoever takes part in the next try, they meet anew
            reasons = {name: str(error)[:300] for name, error in failed.items()}
            machine.ledger.note("refit_failed", policy_version=machine.policy_version, engines=reasons)
        # Whoever was called off is not to blame, unless it was the sender that could not.
        blamed = {name for name, error in failed.items() if not isinstance(error, RefitCalledOff)} or set(failed)
        for name, error in failed.items():
            self._handle(name, handles[name], sent if sent is not None else error, error, name in blamed)
        self._recovery.end_refit()

    def _handle(self, name: str, engine: Any, first: BaseException, error: BaseException, is_to_blame: bool) -> None:
        from ray.exceptions import RayActorError

        self._recovery.fence(name)
        if not is_to_blame:
            return
        self._failures[name] += 1
        if isinstance(error, (EngineDead, RayActorError)):
            self._recovery.lose_engine(name, engine, error)
        elif self._config.recovery.engine == "stop" or self._failures[name] > 2 * _MAX_TRIES:
            raise first
        elif self._failures[name] == _MAX_TRIES:
            self._recovery.lose_engine(name, engine, f"{_MAX_TRIES} refits failed, the last: {error}")

    async def _transfer(
        self, version: int, engines: dict[str, Any]
    ) -> tuple[dict[str, RefitReport | BaseException], BaseException | None]:
        """Per engine its report or why there is none, and the sender's failure if it had one."""
        update = self._update(version)
        if self._members != tuple(engines):
            failure = await self._meet(tuple(engines))
            if failure is not None:
                return dict.fromkeys(engines, failure), failure
        # A trainer that dies ends this at once: engines would wait for it until the deadline.
        sending = [_sent(trainer.send_weights.remote(update)) for trainer in self._fleets.trainers]
        limit_s = update.timeout_s + _GRACE_S
        receiving = [_outcome(engine.refit.remote(update), "the refit", limit_s) for engine in engines.values()]
        sent, received = await asyncio.gather(asyncio.gather(*sending), asyncio.gather(*receiving))
        reports = dict(zip(engines, received, strict=True))
        for name, report in reports.items():
            if isinstance(report, RefitReport) and dict(report.elements_per_layer) != self._elements:
                reports[name] = RefitError(
                    f"{name} loaded other element counts per layer than were sent", wanted_version=version
                )
        return reports, next((error for error in sent if error is not None), None)

    def _update(self, version: int) -> RefitUpdate:
        section, manifest = self._config.refit, self._fleets.manifest
        is_large = sum(spec.num_bytes for spec in manifest) > _MAX_HASHED_BYTES
        by_size: Hashes = "sampled" if is_large else "full"
        return RefitUpdate(
            policy_version=version,
            incarnation=self.incarnation,
            manifest=manifest,
            bucket_bytes=section.bucket_mib << 20,
            timeout_s=section.timeout_s,
            mode=section.mode,
            hashes=by_size if section.hashes == "auto" else section.hashes,
        )

    async def _meet(self, names: tuple[str, ...]) -> BaseException | None:
        from ray.exceptions import RayActorError

        try:
            await self._fleets.connect_refit(names)
        except (RefitError, GeneratorError, RayActorError) as error:
            await self._fleets.check_trainers()
            self._members = ()
            return error
        self._members = names
        return None

    async def probe(self, version: int) -> ProbeDiff | None:
        """Score the probes on both sides at ``version``; the trainer must not step meanwhile.

        None when no engine serves. Raises RefitError when the sides differ by more than is allowed.
        """
        engines = {name: self._fleets.engines[name] for name in self._recovery.serving}
        limit_s = self._config.refit.timeout_s + _GRACE_S
        scoring = [_outcome(engine.score.remote(self._probes), "the probe", limit_s) for engine in engines.values()]
        trainer_sides, engine_sides = await asyncio.gather(
            asyncio.gather(*(trainer.probe.remote(self._probes) for trainer in self._fleets.trainers)),
            asyncio.gather(*scoring),
        )
        sides = []
        for (name, engine), side in zip(engines.items(), engine_sides, strict=True):
            if isinstance(side, BaseException):
                self._recovery.lose_engine(name, engine, side)
            else:
                sides.append(side)
        if not sides:
            return None
        diffs = [probe_diff(engine_side, trainer_sides[0]) for engine_side in sides]
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


async def _outcome(reference: Any, what: str, limit_s: float) -> Any:
    """What a call returned, or what it raised of the failures that a refit can have."""
    from ray.exceptions import RayActorError

    try:
        async with asyncio.timeout(limit_s):
            return await reference
    except TimeoutError:
        return EngineDead(f"no answer to {what} for {limit_s:.0f} s")
    except (RefitError, GeneratorError, RayActorError) as error:
        return error


async def _sent(reference: Any) -> RefitError | None:
    try:
        await reference
    except RefitError as error:
        return error
    return None
