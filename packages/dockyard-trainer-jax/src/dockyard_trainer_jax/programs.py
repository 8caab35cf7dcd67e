"""The compiled programs of one policy, with where their results lie and whose memory they take."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding

from dockyard_core.loss_config import LossConfig
from dockyard_core.optimizer_config import OptimizerConfig
from dockyard_trainer_jax.compiling import Compiler
from dockyard_trainer_jax.layout import PaddedBatch
from dockyard_trainer_jax.optim import AdamState, GradientReport, state_shardings
from dockyard_trainer_jax.step import ModelSpec, Params, StepNumbers, Totals, added, empty_totals, score, updated


class Programs:
    """What a policy runs on its devices."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Params,
        config: OptimizerConfig,
        *,
        reference: ModelSpec | None,
        rows: Sharding,
        meet: Callable[[], object],
    ) -> None:
        has_reference = reference is not None
        self.compiler = Compiler(meet)
        self._spec = spec
        self._reference = reference
        self._loss: LossConfig = config.loss
        self._has_reference = has_reference
        # The graph says which names and shapes there are, and its options where they lie.
        self._updating: Hashable = (spec, config.betas, config.eps, config.weight_decay, config.max_grad_norm)
        state = state_shardings(params)
        spread, everywhere = state.exp_avg, state.count
        # Left to the compiler, results may be gathered on every device.
        totals = Totals(grads=spread, loss=everywhere, sums=everywhere, largest=everywhere)
        self._score = jax.jit(score, static_argnames="spec", out_shardings=rows).lower
        self._empty = jax.jit(partial(empty_totals, has_reference=has_reference), out_shardings=totals)
        self._added = jax.jit(
            partial(added, spec=spec, loss=self._loss), donate_argnames="totals", out_shardings=totals
        )
        report = GradientReport(grad_norm=everywhere, is_skipped=everywhere)
        self._updated = jax.jit(
            partial(updated, config=config),
            donate_argnames=("params", "state"),
            out_shardings=(spread, state, report),
        )

    def score(
        self, params: Params, batch: PaddedBatch, temperature: float, *, which: Literal["current", "reference"]
    ) -> Array:
        """Log-probabilities [F, M] of the tokens of a micro-batch; 0 at padding.

        Args:
            params: all of the model, or of the reference.
            batch: without what only the loss needs.
            temperature: sampling temperature.
            which: the reference has no adapters.
        """
        spec = self._spec if which == "current" else self._reference
        assert spec is not None, "a policy without a reference has none to score"
        lower = partial(self._score, spec=spec)
        scored: Array = self.compiler.run(("score", spec, batch.layout), lower, params, batch, np.float32(temperature))
        return scored

    def empty_totals(self, params: Params) -> Totals:
        """Gradients of 0."""
        totals: Totals = self.compiler.run(("empty", self._spec, self._has_reference), self._empty.lower, params)
        return totals

    def added(self, totals: Totals, params: Params, frozen: Params, batch: PaddedBatch, numbers: StepNumbers) -> Totals:
        """The totals with one more micro-batch; the memory of those given is taken."""
        key = ("added", self._spec, self._loss, self._has_reference, batch.layout)
        more: Totals = self.compiler.run(key, self._added.lower, totals, params, frozen, batch, numbers)
        return more

    def updated(
        self, params: Params, state: AdamState, totals: Totals, learning_rate: float
    ) -> tuple[Params, AdamState, GradientReport]:
        """One step; the memory of parameters and state is taken."""
        key = ("updated", self._updating, self._has_reference)
        stepped: tuple[Params, AdamState, GradientReport] = self.compiler.run(
            key, self._updated.lower, params, state, totals, np.float32(learning_rate)
        )
        return stepped
