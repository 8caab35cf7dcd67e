"""An SGLang server, by its own weight-update endpoints; measured with 0.5.23.

Requests in flight are retracted: they keep their tokens, wait, and go on with the new weights.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dockyard_core.refit import TensorSpec
from dockyard_inference.push.checkpoint_dir import Checkpoint
from dockyard_inference.push.errors import PushError, TransferFailed, Unsuitable
from dockyard_inference.push.http import Background, Server, is_local, own_address
from dockyard_inference.push.names import check_against_directory, check_against_parameters, parameter_names
from dockyard_inference.push.target import Progress, Pushed, Transport

if TYPE_CHECKING:
    import torch

    from dockyard_inference.push.sglang_group import BroadcastGroup

_BUCKET_BYTES = 256 << 20
_RESUME_S = 10.0
"""A server is not left paused because the deadline has passed."""
_STAYS_PAUSED = "the server stays paused, because its weights may be half new: push again, or restart it"


class SglangServer:
    """See ``Target``."""

    def __init__(self, server: Server, model_info: dict[str, Any], advertise: str | None) -> None:
        self._server, self._model_info, self._advertise = server, model_info, advertise
        self._info: dict[str, Any] = server.ask("/server_info") or {}

    @property
    def kind(self) -> str:
        """See ``Target``."""
        return f"SGLang {self._info.get('version', '')}".rstrip()

    @property
    def held_version(self) -> str:
        """See ``Target``."""
        self._model_info = self._server.ask("/model_info") or self._model_info
        return str(self._model_info.get("weight_version", "default"))

    def check(self, checkpoint: Checkpoint) -> str:
        """See ``Target``."""
        compared = ""
        if is_local(self._server.host):
            compared = check_against_directory(checkpoint, str(self._model_info["model_path"]))
        if compared:
            return compared
        try:
            said = self._server.tell("/weights_checker", {"action": "checksum"})
            names = parameter_names(rank["checksums"] for rank in said["ranks"])
        except (TransferFailed, KeyError, TypeError):
            return ""  # SGLang of another version: it takes unknown names in silence
        return check_against_parameters(checkpoint, names)

    def push(self, checkpoint: Checkpoint, version: int, transport: Transport, progress: Progress) -> Pushed:
        """See ``Target``."""
        if transport == "disk" or (transport == "auto" and is_local(self._server.host)):
            try:
                return self._from_disk(checkpoint, version, progress)
            except TransferFailed as error:
                if transport == "disk":
                    raise
                progress(f"the server does not take the directory ({error}); sending the weights")
        return self._distributed(checkpoint, version, progress)

    def _from_disk(self, checkpoint: Checkpoint, version: int, progress: Progress) -> Pushed:
        progress(f"the server loads {checkpoint.path}")
        paused = time.perf_counter()
        self._pause()
        started = time.perf_counter()
        body = {
            "model_path": str(checkpoint.path),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        try:
            self._server.tell("/update_weights_from_disk", body)
        except PushError:
            self._resume()  # a refused update leaves what was served before; one that is late ends before it goes on
            raise
        loaded = time.perf_counter()
        self._resume()
        return Pushed(transport="disk", transfer_s=loaded - started, paused_s=time.perf_counter() - paused)

    def _distributed(self, checkpoint: Checkpoint, version: int, progress: Progress) -> Pushed:
        group = self._join()
        try:
            paused = time.perf_counter()
            self._pause()
            started = time.perf_counter()
            try:
                self._begin()
                self._send(checkpoint, version, group, progress)
                self._server.tell("/end_weight_update", {})
            except PushError as error:
                self._give_up()
                raise type(error)(f"{error}; {_STAYS_PAUSED}") from error
            loaded = time.perf_counter()
            self._resume()
        finally:
            group.close()
        self._server.tell("/destroy_weights_update_group", {"group_name": group.name})
        return Pushed(
            transport=f"collective ({group.backend})",
            transfer_s=loaded - started,
            paused_s=time.perf_counter() - paused,
        )

    def _join(self) -> BroadcastGroup:
        """A group of this process and every worker."""
        try:
            from dockyard_inference.push.sglang_group import BroadcastGroup
        except ModuleNotFoundError as error:
            raise Unsuitable("sending weights needs torch: install dockyard-inference[sender]") from error
        host, port = self._advertise, int(self._info.get("port", 80))
        tp, pp, dp = (int(self._info.get(key) or 1) for key in ("tp_size", "pp_size", "dp_size"))
        if pp > 1 or (dp > 1 and not self._info.get("enable_dp_attention")):
            raise Unsuitable(
                "SGLang numbers its workers in a group by tensor-parallel rank alone: use --transport disk"
            )
        group = BroadcastGroup(
            host=host or own_address(self._server.host, port),
            world_size=1 + tp,
            is_gpu=str(self._info.get("device", "cpu")) != "cpu",
            name=f"dockyard-push-{secrets.token_hex(4)}",
            timeout_s=self._server.left_s,
        )
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        joining = Background(partial(self._server.tell, "/init_weights_update_group", body))
        group.open(joining)
        joining.result(self._server.left_s)
        return group

    def _begin(self) -> None:
        try:
            self._server.tell("/begin_weight_update", {})
        except TransferFailed as error:
            if "already open" not in str(error):
                raise
            self._give_up()  # one that was killed in the middle left it open
            self._server.tell("/begin_weight_update", {})

    def _send(self, checkpoint: Checkpoint, version: int, group: BroadcastGroup, progress: Progress) -> None:
        done, total = 0, checkpoint.num_bytes
        for specs, payload in _buckets(checkpoint):
            done += int(payload.numel())
            is_last = done == total
            body: dict[str, Any] = {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": group.name,
                "load_format": "flattened_bucket",
                "flush_cache": is_last,
            }
            if is_last:
                body["weight_version"] = str(version)
            taking = Background(partial(self._server.tell, "/update_weights_from_distributed", body))
            # A refusal comes before the server joins the broadcast: then nobody will take it.
            group.broadcast(payload, self._server.left_s, taking)
            taking.result(self._server.left_s)
            progress(f"{100 * done // max(total, 1)} % of {total / 1e6:.1f} MB")

    def _pause(self) -> None:
        self._server.tell("/pause_generation", {"mode": "retract"})

    def _resume(self) -> None:
        self._server.tell("/continue_generation", {}, at_least_s=_RESUME_S)

    def _give_up(self) -> None:
        try:
            self._server.tell("/end_weight_update", {})
        except PushError:
            pass  # it was not open, or the server is gone; the first error is the one to tell


def _buckets(checkpoint: Checkpoint) -> Iterator[tuple[list[TensorSpec], torch.Tensor]]:
    """Tensors of one dtype, which keeps every offset aligned, as one run of bytes."""
    import torch

    specs: list[TensorSpec] = []
    parts: list[torch.Tensor] = []
    for spec, tensor in checkpoint.tensors():
        size = sum(part.numel() for part in parts)
        if specs and (specs[0].dtype != spec.dtype or size + spec.num_bytes > _BUCKET_BYTES):
            yield specs, torch.cat(parts)
            specs, parts = [], []
        specs.append(spec)
        parts.append(tensor.view(-1).view(torch.uint8))
    yield specs, torch.cat(parts)
