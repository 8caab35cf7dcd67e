"""vLLM's own weight transfer between GPUs, with its own sending side. Nobody has run this yet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from dockyard_inference.push.checkpoint_dir import Checkpoint
from dockyard_inference.push.errors import TransferFailed, Unsuitable
from dockyard_inference.push.http import Background, Server


class NcclPush:
    """Rank 0 of the group that vLLM's ``nccl`` backend makes."""

    def __init__(self, server: Server, checkpoint: Checkpoint, host: str, world_size: int) -> None:
        try:
            import torch
            from vllm.distributed.weight_transfer import nccl_engine
        except ModuleNotFoundError as error:
            raise Unsuitable("sending over NCCL needs vLLM here as well: install dockyard-inference[vllm]") from error
        if not torch.cuda.is_available():
            raise Unsuitable("sending over NCCL needs a GPU here: use --transport disk")
        self._server, self._module = server, nccl_engine
        self._source: Any = _source(checkpoint)
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        self._info = nccl_engine.NCCLTrainerInitInfo(host, port, world_size, rank=0)

    def send(self) -> None:
        """Open the group and send every tensor. Raises PushError."""
        Background(self._send).result(self._server.left_s)

    def close(self) -> None:
        """Let the workers leave the group."""
        try:
            self._server.tell("/shutdown_weight_transfer_engine")
        except TransferFailed:
            pass  # it was not opened

    def _send(self) -> None:
        engine = self._module.NCCLTrainerWeightTransferEngine.trainer_init(
            self._info, client=_Client(self._server), source=self._source
        )
        engine.send_weights()


class _Client:
    """vLLM's ``VLLMWeightSyncClient`` under our deadline."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._server.tell("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._server.tell("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._server.tell("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.tell("/finish_weight_update", {})


def _source(checkpoint: Checkpoint) -> Any:
    import torch
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Directory(WeightSource):
        """A checkpoint as vLLM's sender wants it."""

        def metadata(self) -> list[Any]:
            return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in checkpoint.specs]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for spec, tensor in checkpoint.tensors():
                yield spec.name, tensor.cuda()

    return Directory()
