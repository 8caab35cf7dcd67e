"""A vLLM server, by the routes of its development mode; measured with 0.32.

Requests in flight are kept: they wait, lose their cached keys and values, and go on with the new weights.
Three ways for the bytes, by how the server was started: ``dockyard-push`` (``vllm_worker`` is loaded
there: checked names, hashed bytes, CPU or GPU), ``nccl`` (vLLM's own transfer between GPUs), or a
directory that the server reads itself.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import RefitError
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate
from dockyard_inference.push.checkpoint_dir import Checkpoint
from dockyard_inference.push.errors import NamesDiffer, PushError, PushTimeout, TransferFailed, Unsuitable
from dockyard_inference.push.http import Background, Server, is_local, own_address
from dockyard_inference.push.names import check_against_directory, check_against_parameters, parameter_names
from dockyard_inference.push.target import Progress, Pushed, Transport

if TYPE_CHECKING:
    from dockyard_inference.sender import RefitSender

ATTESTED = "dockyard-push"
HOW_ATTESTED = (
    "start vLLM with --worker-extension-cls dockyard_inference.push.vllm_worker.PushExtension "
    f'--weight-transfer-config \'{{"backend": "{ATTESTED}"}}\''
)
_MEMORY = Path("/dev/shm")
_STAYS_PAUSED = "the server stays paused, because its weights may be half new: push again, or restart it"


class VllmServer:
    """See ``Target``."""

    def __init__(self, server: Server, version: str, config: dict[str, Any], advertise: str | None) -> None:
        self._server, self._version, self._advertise = server, version, advertise
        self._model = str((config.get("model_config") or {}).get("model", ""))
        self._backend = str((config.get("weight_transfer_config") or {}).get("backend", ""))
        device = config.get("device_config") or {}
        self._is_cpu = "cpu" in str(device.get("device_type") or device.get("device") or device)

    @property
    def kind(self) -> str:
        """See ``Target``."""
        return f"vLLM {self._version}"

    @property
    def held_version(self) -> str:
        """See ``Target``."""
        return str((self._server.ask("/weight_info") or {}).get("weight_version", "default"))

    def check(self, checkpoint: Checkpoint) -> str:
        """See ``Target``."""
        if self._backend == ATTESTED:
            return "names and shapes"  # by every worker, before it takes a byte
        compared = check_against_directory(checkpoint, self._model) if is_local(self._server.host) else ""
        if compared:
            return compared
        try:
            said = self._server.tell("/weight_checker", {"action": "checksum"})
            names = parameter_names([said["checksums"]])
        except (TransferFailed, KeyError, TypeError):
            return ""
        return check_against_parameters(checkpoint, names)

    def push(self, checkpoint: Checkpoint, version: int, transport: Transport, progress: Progress) -> Pushed:
        """See ``Target``."""
        if transport != "disk" and self._backend == ATTESTED:
            return self._attested(checkpoint, version, progress)
        if transport != "disk" and self._backend == "nccl" and (transport == "collective" or not self._can_read):
            return self._nccl(checkpoint, version, progress)
        if transport == "collective":
            raise Unsuitable(f"this vLLM takes no weights over a wire: {HOW_ATTESTED}; or use --transport disk")
        if transport == "auto" and not self._can_read:
            raise Unsuitable(
                f"this vLLM takes no weights over a wire, and {self._server.host} is another machine: {HOW_ATTESTED}; "
                "or, if it sees the directory under the same path, use --transport disk"
            )
        return self._from_disk(checkpoint, version, progress)

    @property
    def _can_read(self) -> bool:
        return is_local(self._server.host)

    def _from_disk(self, checkpoint: Checkpoint, version: int, progress: Progress) -> Pushed:
        if self._is_cpu and checkpoint.is_tied:
            raise Unsuitable(
                "vLLM on a CPU keeps the old output layer of a model with tied embeddings when it reads a directory: "
                f"{HOW_ATTESTED}, and leave --transport out"
            )
        progress(f"the server loads {checkpoint.path}")

        def load() -> None:
            self._rpc("reload_weights", weights_path=str(checkpoint.path))

        return self._while_paused("disk", load, version)

    def _nccl(self, checkpoint: Checkpoint, version: int, progress: Progress) -> Pushed:
        from dockyard_inference.push.vllm_nccl import NcclPush

        host = self._advertise or own_address(self._server.host, 80)
        push = NcclPush(self._server, checkpoint, host, 1 + self._world_size())
        progress(f"sending {checkpoint.num_bytes / 1e6:.1f} MB over NCCL")
        try:
            return self._while_paused("collective (nccl)", push.send, version)
        finally:
            push.close()

    def _while_paused(self, transport: str, load: Any, version: int) -> Pushed:
        paused = time.perf_counter()
        self._pause()
        started = time.perf_counter()
        try:
            load()
            loaded = time.perf_counter()
            self._server.tell("/update_weight_version", {"new_version": str(version)})
        except PushError as error:
            raise type(error)(f"{error}; {_STAYS_PAUSED}") from error
        self._server.tell("/resume")
        return Pushed(transport=transport, transfer_s=loaded - started, paused_s=time.perf_counter() - paused)

    def _attested(self, checkpoint: Checkpoint, version: int, progress: Progress) -> Pushed:
        """The same transaction as a refit of ours, driven over HTTP."""
        with self._sender() as sender:
            connecting = Background(sender.connect)
            _raise_refusal(self._rpc("dockyard_connect", info=asdict(sender.endpoint())))
            try:
                connecting.result(self._server.left_s)
                update = RefitUpdate(policy_version=version, manifest=checkpoint.specs, timeout_s=self._server.left_s)
                sending = Background(partial(sender.send, _stream(checkpoint, progress), update))
                return self._transaction(update, sending, str(sender.transport))
            except RefitError as error:
                raise _as_push_error(error) from error

    @contextmanager
    def _sender(self) -> Iterator[RefitSender]:
        """Bytes for GPUs on this machine go through files in memory: this process need not have a GPU."""
        host, num_ranks = self._advertise or own_address(self._server.host, 80), 1 + self._world_size()
        with TemporaryDirectory(prefix="dockyard-push-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            try:
                from dockyard_inference.sender import RefitSender

                device, timeout_s = "cpu", self._server.left_s
                if not self._is_cpu and self._can_read:
                    sender = RefitSender(
                        host, 0, num_ranks, device, timeout_s, transport="filesystem", directory=Path(folder)
                    )
                else:
                    device = "cpu" if self._is_cpu else "cuda"
                    sender = RefitSender(host, 0, num_ranks, device, timeout_s)
            except ModuleNotFoundError as error:
                raise Unsuitable("sending weights needs torch: install dockyard-inference[sender]") from error
            try:
                yield sender
            finally:
                sender.close()

    def _transaction(self, update: RefitUpdate, sending: Background[Any], transport: str) -> Pushed:
        info = asdict(update) | {"manifest": [list(spec) for spec in update.manifest]}
        _raise_refusal(self._rpc("dockyard_prepare", info=info))
        paused = time.perf_counter()
        self._pause()
        started = time.perf_counter()
        try:
            self._server.tell("/start_weight_update")
            try:
                self._server.tell("/update_weights", {"update_info": info})
            finally:
                self._server.tell("/finish_weight_update", {})
            _raise_refusal([report["failure"] for report in self._rpc("dockyard_report")])
            sending.result(self._server.left_s)
            loaded = time.perf_counter()
            self._server.tell("/update_weight_version", {"new_version": str(update.policy_version)})
        except (PushError, RefitError) as error:
            known = error if isinstance(error, PushError) else _as_push_error(error)
            kind = TransferFailed if isinstance(known, NamesDiffer) else type(known)
            raise kind(f"{known}; {_STAYS_PAUSED}") from error
        self._server.tell("/resume")
        seconds = time.perf_counter() - paused
        self._server.tell("/shutdown_weight_transfer_engine")
        return Pushed(transport=f"attested {transport}", transfer_s=loaded - started, paused_s=seconds)

    def _pause(self) -> None:
        self._server.tell("/pause", mode="keep", clear_cache="true")

    def _world_size(self) -> int:
        return int((self._server.ask("/get_world_size") or {}).get("world_size", 1))

    def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        answer = self._server.tell(
            "/collective_rpc", {"method": method, "kwargs": kwargs, "timeout": self._server.left_s}
        )
        results: list[Any] = answer.get("results", [])
        return results


def _stream(checkpoint: Checkpoint, progress: Progress) -> Any:
    """``Policy.stream_weights`` of a directory."""

    def stream(sink: WeightSink) -> None:
        done, said = 0, -1
        for spec, tensor in checkpoint.tensors():
            sink(WeightChunk(spec.name, spec.shape, (0,) * len(spec.shape), tensor))
            done += spec.num_bytes
            if (percent := 10 * done // max(checkpoint.num_bytes, 1)) > said:
                said = percent
                progress(f"{10 * percent} % of {checkpoint.num_bytes / 1e6:.1f} MB")

    return stream


def _raise_refusal(answers: list[Any]) -> None:
    """Raise what a worker returned as (error class, message); over HTTP it may come as text."""
    for answer in answers:
        if answer in (None, "None"):
            continue
        kind, message = ast.literal_eval(answer) if isinstance(answer, str) else answer
        raise {"WeightMismatch": NamesDiffer, "RefitTimeout": PushTimeout}.get(kind, TransferFailed)(message)


def _as_push_error(error: RefitError) -> PushError:
    message = str(error).rpartition(" (wanted policy version")[0] or str(error)
    kinds = {"WeightMismatch": NamesDiffer, "RefitTimeout": PushTimeout}
    return kinds.get(type(error).__name__, TransferFailed)(message)
