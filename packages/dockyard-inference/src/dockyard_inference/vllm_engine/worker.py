"""What runs inside vLLM's worker processes: a weight-transfer backend and some RPC methods.

vLLM imports this module by name (``worker_extension_cls``), which registers the backend under
``BACKEND`` with vLLM's own factory; nothing else may import it. The control plane (start, update,
finish, version) stays vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from dockyard_core.errors import RefitError, WeightMismatch
from dockyard_core.refit import Hashes, PauseMode, RefitEndpoint, RefitUpdate, Staging, TensorSpec
from dockyard_inference.refit.checkpoint import held_tensors
from dockyard_inference.refit.group import plain_message
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.staging import HostStage
from dockyard_inference.vllm_engine.owner import die_with

BACKEND = "dockyard"
OWNER_KEY = "dockyard_owner_pid"
Failure = tuple[str, str]
"""Class and message of an error that crosses processes."""
_LOAD_ERRORS = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What vLLM's model code raises for weights that it cannot take."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Fields of ``RefitEndpoint``."""

    host: str
    port: int
    world_size: int
    rank_offset: int
    timeout_s: float
    staging: Staging


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Fields of ``RefitUpdate``; the manifest as plain lists."""

    policy_version: int
    incarnation: int
    manifest: list[Any]
    bucket_bytes: int
    timeout_s: float
    mode: PauseMode
    hashes: Hashes
    goes_back: bool = False
    """Not these weights but those before them, which are in host memory."""

    def to_update(self) -> RefitUpdate:
        """The typed record."""
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.manifest)
        return RefitUpdate(
            policy_version=self.policy_version,
            incarnation=self.incarnation,
            manifest=specs,
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
            mode=self.mode,
            hashes=self.hashes,
        )


class DockyardWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives verified buckets and loads them through vLLM's layer-wise reload.

    A failed update ends here as a recorded failure, not as an exception: the session has to be
    finished in any case, so that the next update starts from whole modules.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        die_with(int(self.vllm_config.additional_config[OWNER_KEY]))
        self.receiver = BucketReceiver(self.device)
        self.stage = HostStage()
        self.failure: RefitError | None = None
        self.counter = LoadCounter()
        self._is_tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self._held = held_tensors(self.model_config.model, is_tied=self._is_tied)
        self._goes_back = False
        self._staging: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dockyard-staging")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the sender's group as this worker's rank."""
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self.receiver.connect(RefitEndpoint(**vars(init_info)), rank)
        self.stage.joined(self.receiver)

    def prepare(self, update: RefitUpdate, unable: str = "") -> None:
        """Check the manifest against what this model holds, before a byte moves.

        Where the group stages, this only begins it: the model samples while a thread takes the bytes.
        """
        if self.receiver.is_staging:
            self._staging = self._thread.submit(self._stage, update, unable)
        else:
            self.receiver.prepare(update, self._held, unable)

    def is_staged(self) -> bool:
        """Whether what ``prepare`` began has ended. Raises RefitError if not well."""
        if self._staging is not None and not self._staging.done():
            return False
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.result()
        return True

    def give_up(self) -> None:
        """What was prepared, and perhaps staged, will not be loaded."""
        self.stage.drop()
        self.receiver.report(self.receiver.unfinished(-1))

    def settle(self, is_committed: bool) -> None:
        """The whole engine serves what was staged, or never will."""
        if is_committed:
            self.stage.commit()
        else:
            self.stage.drop()

    def start_weight_update(self) -> None:
        """Let the modules take new weights, layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.failure, self.counter = self.receiver.unfinished(-1), LoadCounter()
        self._expected = set(dict(self.model.named_parameters()))
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take, verify and load every bucket; a failure is kept for ``report``."""
        update, self._goes_back = update_info.to_update(), update_info.goes_back
        self.failure = self.receiver.unfinished(update.policy_version)
        staged = self.stage.held if self._goes_back else self.stage.incoming
        if self._goes_back and staged is None:
            return
        try:
            self._load(update if staged is None else staged.update, staged or self.receiver.receive(update))
            self.failure = None
        except RefitError as error:
            self.failure = error
        except _LOAD_ERRORS as error:
            self.failure = self.receiver.not_loaded(error, update.policy_version)

    def finish_weight_update(self) -> None:
        """Process what was loaded; also after a failure, to leave whole modules behind."""
        started = time.perf_counter()
        failure, self.failure = self.failure, self.failure or self.receiver.unfinished(-1)
        try:
            self._finalize()
            self.failure = failure
        except _LOAD_ERRORS as error:
            self.failure = failure or self.receiver.not_loaded(error, -1)
        finally:
            self.receiver.seconds["load"] += time.perf_counter() - started
            self._report()

    def shutdown(self) -> None:
        """Leave the group."""
        self.receiver.close()

    def _stage(self, update: RefitUpdate, unable: str) -> None:
        self.receiver.prepare(update, self._held, unable)
        self.stage.fill(self.receiver, update)

    def _load(self, update: RefitUpdate, buckets: Iterable[list[tuple[str, torch.Tensor]]]) -> None:
        loaded: set[str] = set()
        for tensors in buckets:
            started = time.perf_counter()
            loaded |= self.model.load_weights(tensors) or self._expected
            self.counter.add(tensors)
            self.receiver.seconds["load"] += time.perf_counter() - started
        self.counter.check(update)
        missing = sorted(self._expected - loaded - ({"lm_head.weight"} if self._is_tied else set()))
        if missing:
            raise WeightMismatch(
                f"the engine's parameters {', '.join(missing[:4])} took nothing", wanted_version=update.policy_version
            )

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            if self._is_tied:
                self._repack_tied_head()

    def _report(self) -> None:
        if self._goes_back:  # the sender was told of the failure
            return
        try:
            self.receiver.report(self.failure)
        except RefitError as error:
            self.failure = error

    def _repack_tied_head(self) -> None:
        """On a CPU a linear layer computes with a packed copy of its weight.

        A tied output layer is sent no tensor of its own, so the layer-wise reload leaves its copy
        stale (vLLM 0.32); it is packed again from the embedding.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, DockyardWeightTransfer)


class RefitExtension:
    """Mixed into vLLM's worker; its methods are reached by ``collective_rpc``."""

    weight_transfer_engine: DockyardWeightTransfer

    def dockyard_connect(self, info: dict[str, Any]) -> Failure | None:
        """None, or the group did not form."""
        return _failure_of(lambda: self.weight_transfer_engine.init_transfer_engine(InitInfo(**info)))

    def dockyard_prepare(self, info: dict[str, Any], unable: str = "") -> Failure | None:
        """None, or the manifest was refused. Where the group stages: see ``dockyard_staged``."""
        return _failure_of(lambda: self.weight_transfer_engine.prepare(UpdateInfo(**info).to_update(), unable))

    def dockyard_staged(self) -> tuple[bool, Failure | None]:
        """Whether staging has ended, and how if not well."""
        is_over = True

        def ask() -> None:
            nonlocal is_over
            is_over = self.weight_transfer_engine.is_staged()

        failure = _failure_of(ask)
        return is_over, failure

    def dockyard_give_up(self) -> None:
        """The engine will not load what it prepared for."""
        self.weight_transfer_engine.give_up()

    def dockyard_settle(self, is_committed: bool) -> None:
        """Keep what was staged as what is served, or drop it."""
        self.weight_transfer_engine.settle(is_committed)

    def dockyard_report(self) -> dict[str, Any]:
        """How the last update ended on this rank."""
        engine = self.weight_transfer_engine
        return {
            "failure": None if engine.failure is None else _as_failure(engine.failure),
            "num_tensors": engine.counter.num_tensors,
            "num_bytes": engine.counter.num_bytes,
            "elements_per_layer": dict(engine.counter.per_layer),
            "seconds": dict(engine.receiver.seconds),
        }


def _failure_of(work: Callable[[], None]) -> Failure | None:
    try:
        work()
    except RefitError as error:
        return _as_failure(error)
    return None


def _as_failure(error: RefitError) -> Failure:
    return type(error).__name__, plain_message(error)
