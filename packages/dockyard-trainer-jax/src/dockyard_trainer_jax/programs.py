"""The compiled programs of one policy, with where their results lie and whose memory they take."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import jax
import numpy as np
from jax import Array

from dockyard_core.loss_config import LossConfig
from dockyard_core.optimizer_config import OptimizerConfig
from dockyard_trainer_jax.compiling import Compiler
from dockyard_trainer_jax.layout import PaddedBatch
from dockyard_trainer_jax.optim import AdamState, GradientReport, state_shardings
from dockyard_trainer_jax.step import ModelSpec, Params, StepNumbers, Totals, added, empty_totals, score, updated


class Programs:
    """What a policy runs on its devices."""

    def __init__(self, spec: ModelSpec, params: Params, config: OptimizerConfig, *, has_reference: bool) -> None:
        self.compiler = Compiler()
        self._spec = spec
        self._loss: LossConfig = config.loss
        self._has_reference = has_reference
        # The graph says which names and shapes there are, and its options where they lie.
        self._updating: Hashable = (spec, config.betas, config.eps, config.weight_decay, config.max_grad_norm)
        state = state_shardings(params)
        spread, everywhere = state.exp_avg, state.count
        # Left to the compiler, results may be gathered on every device.
        totals = Totals(grads=spread, loss=everywhere, sums=everywhere, largest=everywhere)
        self._score = partial(jax.jit(score, static_argnames="spec").lower, spec=spec)
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

    def score(self, params: Params, batch: PaddedBatch, temperature: float) -> Array:
        """Log-probabilities [F, M] of the tokens of a micro-batch; 0 at padding."""
        key = ("score", self._spec, batch.shape)
        scored: Array = self.compiler.run(key, self._score, params, batch, np.float32(temperature))
        return scored

    def empty_totals(self, params: Params) -> Totals:
        """Gradients of 0."""
        totals: Totals = self.compiler.run(("empty", self._spec, self._has_reference), self._empty.lower, params)
        return totals

    def added(self, totals: Totals, params: Params, batch: PaddedBatch, numbers: StepNumbers) -> Totals:
        """The totals with one more micro-batch; the memory of those given is taken."""
        key = ("added", self._spec, self._loss, self._has_reference, batch.shape)
        more: Totals = self.compiler.run(key, self._added.lower, totals, params, batch, numbers)
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
