"""JaxPolicy: the `Policy` seam over a decoder of this package.

Shape legend: B = rows, L = row length, F = blocks of rows, M = token slots of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax import Array

from dockyard_core.batch import BatchShard
from dockyard_core.batch_checks import check_shard
from dockyard_core.errors import ConfigError
from dockyard_core.hub import resolve_model_dir
from dockyard_core.optimizer_config import learning_rate_at
from dockyard_core.policy import PolicySnapshot, StepMetrics, WeightSink
from dockyard_trainer_jax import checkpoint, weights
from dockyard_trainer_jax.agreeing import check_agreed, check_same_policy, lay_out_together
from dockyard_trainer_jax.compiling import keep_programs
from dockyard_trainer_jax.config import JaxPolicyConfig
from dockyard_trainer_jax.layout import LaidOut, PaddedBatch
from dockyard_trainer_jax.loading import load_causal_lm, sampled_checksum
from dockyard_trainer_jax.lora import adapters_of, apply_lora, base_of
from dockyard_trainer_jax.model import CausalLM, ComputeOptions
from dockyard_trainer_jax.names import named_parameters
from dockyard_trainer_jax.optim import AdamState, GradientReport, init_state
from dockyard_trainer_jax.programs import Programs
from dockyard_trainer_jax.ranks import Ranks
from dockyard_trainer_jax.shapes import Shape, Shapes
from dockyard_trainer_jax.snapshot import take
from dockyard_trainer_jax.step import ModelSpec, Params, StepNumbers, StepSums, Totals


class JaxPolicy:
    """A trainable policy and its optimizer; one object per process, every method collective.

    Implements ``dockyard_core.policy.Policy``. Build it with `from_pretrained`.
    """

    def __init__(self, model: str | Path, config: JaxPolicyConfig) -> None:
        keep_programs(config.compilation_cache_dir)
        self.config = config
        self.ranks = Ranks(config)
        self.num_skipped_steps = 0
        self.num_updates = 0
        """Optimizer steps taken: `updates_per_batch` for each version."""
        # Steps have their own: how they round is not to depend on what else is scored in between.
        self._shapes, self._scored_shapes = (Shapes(config.row_length_buckets) for _ in range(2))
        self._version = 0
        with self.ranks.together(ConfigError("another rank could not load policy.model; see that rank's error")):
            self.model_dir = resolve_model_dir(model)
            causal_lm = load_causal_lm(self.model_dir, self._options)
            self.source = weights.ModelSource.of(self.model_dir)
            checksum = sampled_checksum(self.model_dir)
        self.model_config = causal_lm.config
        check_same_policy(self.ranks, config, self.model_config, checksum)
        base = ModelSpec.of(causal_lm, chunk_tokens=config.logprob_chunk_tokens)
        if config.lora is not None:
            apply_lora(causal_lm, config.lora, seed=config.seed)
        spec = ModelSpec.of(causal_lm, chunk_tokens=config.logprob_chunk_tokens)
        held = _arrays(causal_lm)
        self.params: Params = held if config.lora is None else adapters_of(held)
        """What a step changes: all parameters, or adapters."""
        self.frozen: Params = {} if config.lora is None else base_of(held)
        """The parameters under the adapters."""
        self.state: AdamState = init_state(self.params)
        self._reference: Params | None = None
        if config.needs_reference:  # with adapters, the base is the reference
            self._reference = self.frozen or _arrays(load_causal_lm(self.model_dir, self._options))
        self._programs = Programs(
            spec,
            self.params,
            config,
            reference=base if config.needs_reference else None,
            rows=self.ranks.batch_sharding,
            meet=lambda: self.ranks.gather(None),
        )

    @classmethod
    def from_pretrained(cls, model: str | Path, config: JaxPolicyConfig) -> JaxPolicy:
        """Load a Qwen2, Qwen3, Llama or Qwen3-MoE checkpoint; no device ever holds more than its part.

        Args:
            model: a directory with config.json and safetensors, or a hub id.
            config: optimizer, precision, parallelism, loss and compilation.

        Raises ConfigError for a directory that does not exist, holds no model, another family or other tensors than
        its config.json says, and for sizes that do not divide.
        """
        return cls(model, config)

    @property
    def _options(self) -> ComputeOptions:
        return ComputeOptions(dtype=self.config.dtype, remat=self.config.activation_checkpointing, mesh=self.ranks.mesh)

    @property
    def data_rank(self) -> int:
        """Which of ``num_data_ranks`` shards of a batch this process takes."""
        return self.ranks.data_rank

    @property
    def num_data_ranks(self) -> int:
        """Into how many shards a batch is split."""
        return self.ranks.data_size

    @property
    def version(self) -> int:
        """Batches trained on; names the weights."""
        return self._version

    @property
    def shapes(self) -> set[Shape]:
        """Of micro-batches that steps were taken on: what a run compiles for."""
        return self._shapes.known

    @property
    def num_compiled(self) -> int:
        """Programs this policy had to compile, of those that the process did not have yet."""
        return self._programs.compiler.num_compiled

    @property
    def compile_s(self) -> float:
        """Seconds spent on them, less where a program was kept by an earlier process."""
        return self._programs.compiler.compile_s

    def logprobs(self, shard: BatchShard, which: Literal["current", "reference"] = "current") -> tuple[np.ndarray, ...]:
        """log_softmax(logits / shard.temperature) of each trained token given its past.

        Returns one float32 array [B, L] per micro-batch; 0.0 where ``loss_mask`` is False.
        Raises ConfigError when the reference is asked for and was not kept.
        """
        laid_out = self._laid_out(shard, f"{which} logprobs", self._scored_shapes, with_untrained=True)
        if which == "reference" and self._reference is None:
            raise ConfigError(
                "reference logprobs need a reference, got kl_coef=0 and load_reference=False; set load_reference=True"
            )
        scored = self._score([part.batch for part in laid_out], shard, which)
        return tuple(
            part.unpadded(self.ranks.own_rows(logprobs_FM), micro_batch.shape)
            # Another process may have more micro-batches; here they are padding.
            for part, logprobs_FM, micro_batch in zip(laid_out, scored, shard.micro_batches, strict=False)
        )

    def _laid_out(self, shard: BatchShard, call: str, shapes: Shapes, *, with_untrained: bool) -> list[LaidOut]:
        """The micro-batches on the devices; a shard that one process refuses ends the call on all before it begins."""
        with self.ranks.together(RuntimeError("another rank could not read its shard; see that rank's error")):
            check_shard(shard, vocab_size=self.model_config.vocab_size)
        check_agreed(self.ranks, shard, call, num_updates=self.num_updates)
        parts = lay_out_together(
            self.ranks, shard, shapes, share_prefixes=self.config.share_prefixes, with_untrained=with_untrained
        )
        return [part._replace(batch=self.ranks.placed(part.batch)) for part in parts]

    def _score(
        self, batches: Sequence[PaddedBatch], shard: BatchShard, which: Literal["current", "reference"]
    ) -> list[Array]:
        params = self._reference if which == "reference" else self.params | self.frozen
        assert params is not None, "the reference is asked for where there is one"
        # What is carried for the loss is no part of the program's shape.
        plain = [replace(batch, proximal_logprobs_FM=None, ref_logprobs_FM=None) for batch in batches]
        return [self._programs.score(params, batch, shard.temperature, which=which) for batch in plain]

    def train_step(self, shard: BatchShard) -> StepMetrics:
        """All updates on this process's share of a batch; version + 1 unless skipped.

        Under ``proximal="given"`` the ratio is taken to the logprobs that the shard carries, or else to
        those of the weights before the first update. An update whose loss or gradient is not finite is
        skipped: weights and moments stay as they were, and ``num_skipped_steps`` grows. A step all of
        whose updates are skipped leaves the version as it was.

        Metrics are the first update's, except ``grad_norm``, ``loss`` and ``clip_fraction``, which are
        means over the updates that were not skipped.
        """
        # Micro-batches without trained tokens, on any process, add nothing.
        batches = [part.batch for part in self._laid_out(shard, "train_step", self._shapes, with_untrained=False)]
        batches = self._with_targets(batches, shard)
        learning_rate = learning_rate_at(self.config, self._version)
        # Nothing is fetched before all updates are on their way.
        launched = [self._update(batches, shard, learning_rate) for _ in range(self.config.updates_per_batch)]
        taken = [StepSums.of(totals, report) for totals, report in launched]
        num_skipped = sum(sums.is_skipped for sums in taken)
        self.num_skipped_steps += num_skipped
        self.num_updates += len(taken) - num_skipped
        is_skipped = num_skipped == len(taken)
        self._version += not is_skipped
        return self._metrics(shard, taken, learning_rate, is_skipped=is_skipped)

    def _with_targets(self, batches: list[PaddedBatch], shard: BatchShard) -> list[PaddedBatch]:
        """With what the loss compares with: the reference's logprobs, and those before the first update."""
        if self._reference is not None:
            scored = self._score(batches, shard, "reference")
            batches = [replace(batch, ref_logprobs_FM=one) for batch, one in zip(batches, scored, strict=True)]
        if self.config.loss.proximal != "given":
            return [replace(batch, proximal_logprobs_FM=None) for batch in batches]
        if any(batch.proximal_logprobs_FM is None for batch in batches):
            scored = self._score(batches, shard, "current")
            batches = [replace(batch, proximal_logprobs_FM=one) for batch, one in zip(batches, scored, strict=True)]
        return batches

    def _update(
        self, batches: Sequence[PaddedBatch], shard: BatchShard, learning_rate: float
    ) -> tuple[Totals, GradientReport]:
        """One update; what comes back is still being computed, and has no gradients."""
        numbers = StepNumbers.of(shard, self.config.loss)
        totals = self._programs.empty_totals(self.params)
        for batch in batches:
            totals = self._programs.added(totals, self.params, self.frozen, batch, numbers)
        self.params, self.state, report = self._programs.updated(self.params, self.state, totals, learning_rate)
        return totals._replace(grads={}), report

    def _metrics(
        self, shard: BatchShard, taken: Sequence[StepSums], learning_rate: float, *, is_skipped: bool
    ) -> StepMetrics:
        counted = [sums for sums in taken if is_skipped or not sums.is_skipped]
        means, largest = dict(taken[0].means), dict(taken[0].largest)
        means.pop("clip_fraction")

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(counted)

        return StepMetrics(
            policy_version=self._version,
            loss=mean([sums.loss for sums in counted]),
            grad_norm=mean([sums.grad_norm for sums in counted]),
            learning_rate=learning_rate,
            entropy=means.pop("entropy"),
            clip_fraction=mean([sums.means["clip_fraction"] for sums in counted]),
            kl_ref=means.pop("kl_ref", 0.0),
            offpolicy_abs_diff_mean=means.pop("offpolicy_abs_diff_mean"),
            offpolicy_abs_diff_max=largest.pop("offpolicy_abs_diff_max"),
            num_valid_tokens=shard.num_valid_tokens,
            is_skipped=is_skipped,
            extra=means
            | largest
            | {
                "num_skipped_steps": float(self.num_skipped_steps),
                "num_compiled_shapes": float(len(self.shapes)),
            },
        )

    def stream_weights(self, sink: WeightSink) -> None:
        """Hand every whole tensor to ``sink`` in the order of ``weight_manifest``, tied ones once."""
        weights.stream(
            self.params | self.frozen, sink, dtype=self.config.dtype, lora=self.config.lora, ranks=self.ranks
        )

    def snapshot(self) -> PolicySnapshot:
        """Copy this process's part of weights and moments into host memory (collective)."""
        return take(self)

    def save(self, directory: Path) -> None:
        """Write weights, moments and version, atomically.

        From one process that trains every parameter it is a Hugging Face model directory too. Raises OSError on
        every process when the disk does not take it; ``directory`` is then as it was.
        """
        checkpoint.save(self, Path(directory))

    def restore(self, directory: Path) -> None:
        """Read what ``save`` wrote, or any number of ranks of the PyTorch trainer; the next step is the one after.

        The reference, if any, stays the one this policy was built with. Raises UserError when the directory is no
        checkpoint of this model; the policy is then unchanged.
        """
        self.resume(checkpoint.restore(self, Path(directory)))

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Go on with the counters of a checkpoint whose weights and moments are in place."""
        self._version = int(meta["version"])
        self.num_updates = int(meta["num_updates"])
        self.num_skipped_steps = int(meta["num_skipped_steps"])
        self._shapes.known = {Shape(*shape) for shape in meta.get("shapes", [])}


def _arrays(causal_lm: CausalLM) -> Params:
    return {name: param[...] for name, param in named_parameters(causal_lm).items()}
