"""The receiving side inside a vLLM worker, without an engine around it."""

from __future__ import annotations

import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dockyard_core.errors import RefitError
from dockyard_core.policy import WeightChunk
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.staging import HostStage

pytest.importorskip("vllm")


class Refusing(torch.nn.Module):
    """Takes no weights, as a model of vLLM does when a name or a shape is not its own."""

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        raise KeyError(tensors[0][0])


class Unfinished(torch.nn.Module):
    """Takes every weight."""

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in tensors}


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Refusing(), None, "could not load the weights: KeyError: 'w'"),
        (Unfinished(), RuntimeError("out of memory"), "could not load the weights: RuntimeError: out of memory"),
        (Unfinished(), ZeroDivisionError("a fault of ours"), "stopped in the middle of the load"),
    ],
)
def test_a_load_or_its_processing_that_fails_is_not_attested(
    model: torch.nn.Module, error: Exception | None, message: str
) -> None:
    from dockyard_inference.vllm_engine import worker

    class Worker(worker.DockyardWeightTransfer):
        def __init__(self) -> None:
            self.receiver, self.model = BucketReceiver(torch.device("cpu")), model
            self.failure, self.counter, self.stage, self._goes_back = None, LoadCounter(), HostStage(), False
            self._is_tied, self._held, self._expected = False, {"w": (4,)}, {"w"}

        def _finalize(self) -> None:
            if error is not None:
                raise error

    update = RefitUpdate(policy_version=1, manifest=(TensorSpec("w", "float32", (4,)),), timeout_s=20.0)
    info: dict[str, Any] = asdict(update) | {"manifest": [list(spec) for spec in update.manifest]}
    sender = RefitSender("127.0.0.1", 0, 2, transport="collective")
    engine = Worker()
    extension = SimpleNamespace(weight_transfer_engine=engine)
    reports: list[dict[str, Any]] = []

    def work() -> None:
        engine.receiver.connect(sender.endpoint(), 1)
        engine.prepare(update)
        engine.receive_weights(worker.UpdateInfo(**info))
        try:
            engine.finish_weight_update()
        except ZeroDivisionError:
            pass
        reports.append(worker.RefitExtension.dockyard_report(extension))  # type: ignore[arg-type]

    thread = threading.Thread(target=work)
    thread.start()
    sender.connect()
    with pytest.raises(RefitError, match=message):
        sender.send(lambda sink: sink(WeightChunk("w", (4,), (0,), torch.ones(4))), update)
    thread.join(60)
    assert message in reports[0]["failure"][1]
    sender.close()
