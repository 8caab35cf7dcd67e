"""What vLLM's processes are told for a refit, one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import GeneratorError, RefitError, WeightMismatch
from dockyard_core.refit import RefitEndpoint, RefitUpdate
from dockyard_inference.refit.staging import rolled_back
from dockyard_inference.vllm_engine.errors import engine_errors, raise_failure

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


class WeightSession:
    """The receiving side of one engine, in all of its workers. Raises GeneratorError besides what is said."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._is_open = False
        """vLLM's weight-update session is open, or was when it stopped answering."""
        self.asked = ""
        """The call that is under way."""
        self.is_staging = False

    async def connect(self, endpoint: RefitEndpoint, held_version: int) -> None:
        """Join the sender's group with every worker. Raises RefitTimeout."""
        await self._end_open_session()
        raise_failure(await self._rpc("dockyard_connect", asdict(endpoint)), -1, held_version)
        self.is_staging = endpoint.staging == "host"

    async def prepare(self, update: RefitUpdate, held_version: int, unable: str) -> None:
        """Let every worker accept the manifest, and stage the bytes where the group does so. Raises RefitError."""
        await self._end_open_session()
        failures = await self._rpc("dockyard_prepare", _as_info(update), unable)
        raise_failure(failures, update.policy_version, held_version)
        if self.is_staging:
            await self._staged(update, held_version)

    async def stop(self, update: RefitUpdate) -> None:
        """Stop sampling, and do with the live requests what the update's mode says."""
        self.asked = "pause"
        with engine_errors():
            mode = "abort" if update.mode == "abort" else "keep"  # those that were to end have ended
            await self._engine.pause_generation(mode=mode, clear_cache=True)

    async def load(self, update: RefitUpdate, held_version: int) -> list[dict[str, Any]]:
        """Let every worker load the update; returns their reports. Raises RefitError."""
        reports = await self._run_update(_as_info(update))
        raise_failure([report["failure"] for report in reports], update.policy_version, held_version)
        return reports

    async def settle(self, *, is_committed: bool) -> None:
        """What was staged is served from now on, or never."""
        if self.is_staging:
            await self._rpc("dockyard_settle", is_committed)

    async def give_up(self) -> None:
        """Tell the sender that what every worker prepared for will not be loaded."""
        await self._rpc("dockyard_give_up")

    async def go_back(self, update: RefitUpdate, failure: RefitError, held_version: int) -> RefitError | None:
        """After a load that failed: take the version before from host memory; None if it is not there."""
        if not self.is_staging:
            return None
        reports = await self._run_update(_as_info(update) | {"goes_back": True})
        is_whole = all(report["failure"] is None for report in reports)
        await self.settle(is_committed=False)
        return rolled_back(failure, held_version) if is_whole else None

    async def _end_open_session(self) -> None:
        """It reports to, and leaves, the group that a worker is in: so neither to a new update nor to a new group."""
        if self._is_open:
            self._is_open, self.asked = False, "finish_weight_update"
            with suppress(GeneratorError), engine_errors():
                await self._engine.finish_weight_update()

    async def _staged(self, update: RefitUpdate, held_version: int) -> None:
        pause_s = _FIRST_POLL_S
        pending: Sequence[tuple[bool, Any]] = ()
        while not pending or not all(is_over for is_over, _ in pending):
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_POLL_S)
            said = await self._rpc("dockyard_staged")
            # A worker that has told its failure has forgotten it by the next time.
            pending = [old if old[1] is not None else new for old, new in zip(pending or said, said, strict=True)]
        raise_failure([failure for _, failure in pending], update.policy_version, held_version)

    async def _run_update(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with engine_errors():
            self.asked, self._is_open = "update_weights", True
            await self._engine.start_weight_update()
            try:
                with engine_errors():
                    await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
            except GeneratorError:
                await self._engine.finish_weight_update()
                self._is_open = False
                raise
            self.asked = "finish_weight_update"
            await self._engine.finish_weight_update()
            self._is_open = False
        return await self._rpc("dockyard_report")

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        self.asked = method
        with engine_errors():
            return list(await self._engine.collective_rpc(method, args=arguments))


def slowest(reports: Sequence[dict[str, Any]], update: RefitUpdate, held_version: int) -> dict[str, Any]:
    """The report of the slowest worker. Raises WeightMismatch unless all took what was announced."""
    for report in reports:
        if report["num_tensors"] != len(update.manifest):
            raise WeightMismatch(
                f"a worker attests {report['num_tensors']} tensors of {len(update.manifest)}",
                wanted_version=update.policy_version,
                held_version=held_version,
            )
    return max(reports, key=lambda report: sum(report["seconds"].values()))


def _as_info(update: RefitUpdate) -> dict[str, Any]:
    return asdict(update) | {"manifest": [list(spec) for spec in update.manifest]}
