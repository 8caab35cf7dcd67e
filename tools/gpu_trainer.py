"""The checks of tools/gpu_check.py that ask whether the torch trainer is right on one device.

See `gpu_paths` for the rules of a check, `gpu_trainer_ranks` for several devices, and `gpu_trainer_speed` for speed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.policy import Policy, WeightChunk, WeightSink
from dockyard_core.refit import TensorSpec
from dockyard_core.testing.policy_contract import PolicyContract
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, weight_manifest

POLICY = Path(__file__).resolve().parent.parent / "apps/grpo/src/dockyard_grpo/quickstart/policy"
TIMEOUT_S = 120.0
VOCAB_SIZE = 64
MODELS = (("qwen2", True), ("qwen3", False))
"""Family, and whether input and output embedding are one."""
SPLIT_LAW = "test_splitting_a_step_into_micro_batches_changes_nothing"
NOT_IN_BFLOAT16 = {SPLIT_LAW: "its metrics must agree to 1e-4, and a bfloat16 has 8 bits"}
Figures = dict[str, Any]


def tiny_model(directory: Path, family: str, *, is_tied: bool) -> Path:
    """Save a random model, with weights so large that attention matters to the logprobs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, family)))
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )
    path = directory / f"{family}-{'tied' if is_tied else 'untied'}"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def random_sequences(seed: int, count: int, lengths: tuple[int, int], vocab_size: int) -> list[TrainSequence]:
    """Sequences of which all but the first tokens are trained."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        num_tokens = int(rng.integers(*lengths))
        mask = np.arange(num_tokens) >= min(8, lengths[0] // 2)
        made.append(
            TrainSequence(
                token_ids_T=rng.integers(3, vocab_size, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, rng.normal(-5, 0.3, num_tokens), 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return made


def trainer(device: str) -> Figures:
    (shard,) = pack_batch(random_sequences(0, 16, (24, 64), 500))
    steps, weights = [], []
    for where in ("cpu", device):
        config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, max_grad_norm=1e9, device=where)
        policy = TorchPolicy.from_pretrained(POLICY, config)
        steps.append(policy.train_step(shard))
        weights.append([parameter.detach().cpu() for parameter in policy.causal_lm.parameters()])
    ours, theirs = steps
    loss_diff = abs(ours.loss - theirs.loss)
    norm_diff = abs(ours.grad_norm / theirs.grad_norm - 1)
    weight_diff = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
    figures = {"loss": ours.loss, "loss_diff": loss_diff, "grad_norm_rel_diff": norm_diff, "weight_diff": weight_diff}
    assert loss_diff <= 1e-5, figures
    assert norm_diff <= 1e-4, figures
    assert weight_diff <= 1e-5, figures
    return figures


class ReadablePolicy(TorchPolicy):
    """Streams what NumPy can read: float32 in host memory."""

    def stream_weights(self, sink: WeightSink) -> None:
        def on_host(chunk: WeightChunk) -> None:
            sink(chunk._replace(array=chunk.array.to("cpu", torch.float32)))

        super().stream_weights(on_host)


class DeviceContract(PolicyContract):
    """The laws of a policy on a device, in a group of one rank.

    In bfloat16 the laws of equality stay exact, because equal products are rounded equally, and they are stated for
    the float32 weights of the optimizer. Where packing or the order of sums differs, activations are rounded
    differently: logprobs may differ by 0.05, and weights by a fifth of what one step moves them, for which eps has to
    be so large that a gradient near 0 stays a step near 0.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        self._model, self._is_rounded = model, dtype == "bfloat16"
        eps = 1e-2 if self._is_rounded else 1e-4
        self._values = {"learning_rate": 1e-3, "eps": eps, "weight_decay": 0.1, "device": device, "dtype": dtype}
        if self._is_rounded:
            self.logprob_atol, self.weight_atol = 0.05, 2e-4

    def make_policy(self) -> Policy:
        config = TorchPolicyConfig(**self._values)
        return ReadablePolicy.from_pretrained(self._model, config, process_group=distributed.group.WORLD)

    def manifest(self, policy: Policy) -> Sequence[TensorSpec]:
        assert isinstance(policy, TorchPolicy)
        return weight_manifest(policy)

    def weights(self, policy: Policy) -> dict[str, np.ndarray]:
        if not self._is_rounded:
            return super().weights(policy)
        assert isinstance(policy, TorchPolicy)
        params = policy.causal_lm.named_parameters()
        return {name: param.detach().to("cpu", copy=True).numpy() for name, param in params}

    def laws(self) -> Iterator[Callable[..., None]]:
        """Those that hold in this precision."""
        for name in dir(self):
            if name.startswith("test_") and not (self._is_rounded and name in NOT_IN_BFLOAT16):
                yield getattr(self, name)


def trainer_contract(device: str) -> Figures:
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name, one_group(0, 1, device, Path(name)):
        folder = Path(name)
        for family, is_tied in MODELS:
            model = tiny_model(folder, family, is_tied=is_tied)
            for dtype in ("float32", "bfloat16"):
                laws = list(DeviceContract(model, device, dtype).laws())
                for law in laws:
                    print(family, dtype, law.__name__, flush=True)  # names the law that fails in the log's tail
                    empty = Path(tempfile.mkdtemp(dir=folder))
                    law(*[empty] * ("tmp_path" in signature(law).parameters))
                figures[f"{family} {dtype} laws"] = len(laws)
    return figures | {f"bfloat16 without {law}": reason for law, reason in NOT_IN_BFLOAT16.items()}


@contextmanager
def one_group(rank: int, world_size: int, device: str, folder: Path) -> Iterator[None]:
    """The group of all ranks, of NCCL on GPUs: one GPU for each rank."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = distributed.FileStore(str(folder / "store"), world_size)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


PATHS: Mapping[str, Callable[[str], Figures]] = {"trainer": trainer, "trainer-contract": trainer_contract}
