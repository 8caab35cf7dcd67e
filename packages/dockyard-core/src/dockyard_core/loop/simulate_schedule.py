"""What one simulated run is made of: sizes, durations and faults. All times are whole ticks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from dockyard_core.loop.config import LoopConfig


@dataclass(frozen=True, kw_only=True)
class Durations:
    """How long a kind of work takes."""

    mean: int = 10
    """Ticks; of ``heavy`` the scale, whose mean is six times as long and whose variance is infinite."""
    shape: Literal["fixed", "exponential", "heavy"] = "fixed"

    def draw(self, rng: random.Random) -> int:
        """One duration in ticks, >= 1 unless it is fixed at 0."""
        if self.shape == "fixed":
            return self.mean
        tail = max(1.0 - rng.random(), 1e-9)
        factor = -math.log(tail) if self.shape == "exponential" else tail ** (-1 / 1.2)
        return 1 + int(self.mean * factor)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, each with its own probability."""

    infra_error: float = 0.0
    """Per rollout: it ends without a verdict."""
    lost: float = 0.0
    """Per group: its end is not heard of before the driver gives it up; half of them are heard of later."""
    duplicated: float = 0.0
    """Per end of a group and per attestation: it is delivered twice."""
    late: float = 0.0
    """Per end of a group: it is delivered later, after others that ended after it."""
    zero_signal: float = 0.0
    """Per group: all of its rollouts are worth the same."""
    engine_death: float = 0.0
    """Per run of a group: its first engine, or whichever it is on, dies; it comes back without weights."""
    not_attested: float = 0.0
    """Per engine and refit: it does not attest, or attests another version; it is tried again."""
    nonfinite: float = 0.0
    """Per step: the gradient is not finite, the batch is dropped."""
    crash: float = 0.0
    """Per moment (event of the schedule or event of the ledger): the driver and the engines die."""
    max_crashes: int = 3
    max_faults: int = 300
    """Of all kinds together; a rollout that would miss its deadline afterwards ends just in time."""
    crash_moments: frozenset[int] = frozenset()
    """Moments, from 0, at which they die for certain."""
    power_loss: float = 0.0
    """Per crash: events that were not synced are gone from the disk too."""
    disk_full: float = 0.0
    """Per save: nothing of it is kept."""
    damaged: float = 0.0
    """Per crash: the newest checkpoint cannot be read afterwards."""

    @property
    def drops_groups(self) -> bool:
        """Whether a group may leave the loop untrained."""
        return bool(self.infra_error or self.lost or self.nonfinite)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One simulated run."""

    num_prompts_per_step: int = 2
    num_generations_per_prompt: int = 2
    max_staleness: int = 1
    max_steps: int = 4
    num_tasks: int = 5
    num_engines: int = 1
    sampler_seed: int = 0
    generate: Durations = field(default_factory=Durations)
    """Of one rollout, its judging included; a group ends with its last rollout."""
    train: Durations = field(default_factory=Durations)
    refit: Durations = field(default_factory=Durations)
    """Of one engine in one try."""
    save: Durations = field(default_factory=Durations)
    max_replaced_per_step: int = 0
    evaluate: Durations = field(default_factory=Durations)
    evaluate_every: int | None = None
    """Steps; None = never. Else also after the last one."""
    is_pinned: bool = True
    checkpoint_every: int | None = None
    """Steps; None = only after the last one."""
    keep_last: int = 2
    deadline: int | None = None
    """Ticks after which a rollout is invalid by ``deadline``."""
    slow_groups: frozenset[int] = frozenset()
    """Groups, counted from 0 in the order of their start, that take ``slow_factor`` times as long."""
    slow_factor: int = 50
    faults: Faults = field(default_factory=Faults)

    @property
    def loop(self) -> LoopConfig:
        """The machine's share of it."""
        return LoopConfig(
            num_prompts_per_step=self.num_prompts_per_step,
            num_generations_per_prompt=self.num_generations_per_prompt,
            max_staleness=self.max_staleness,
            max_steps=self.max_steps,
            max_replaced_per_step=self.max_replaced_per_step,
        )

    @property
    def num_groups(self) -> int:
        """Groups that the steps of a whole run consume."""
        return self.max_steps * self.num_prompts_per_step

    @property
    def evaluations(self) -> list[int]:
        """Steps after which there is an evaluation."""
        every = self.evaluate_every
        steps = range(1, self.max_steps + 1) if every is not None else ()
        return [step for step in steps if step == self.max_steps or step % (every or 1) == 0]

    @property
    def drops_groups(self) -> bool:
        """Whether a group may leave the loop untrained."""
        is_replaced = bool(self.max_replaced_per_step and self.faults.zero_signal)
        return self.faults.drops_groups or self.deadline is not None or is_replaced


def random_schedule(rng: random.Random) -> Schedule:
    """A small schedule of any sizes and shapes; a third drop nothing, a quarter never crash."""
    shapes: tuple[Literal["fixed", "exponential", "heavy"], ...] = ("fixed", "exponential", "heavy")

    def durations(longest: int) -> Durations:
        return Durations(mean=rng.randint(1, longest), shape=rng.choice(shapes))

    def rate(highest: float) -> float:
        return rng.choice((0.0, highest / 4, highest))

    may_drop = rng.random() < 2 / 3
    generate = durations(40)
    return Schedule(
        num_prompts_per_step=rng.randint(1, 3),
        num_generations_per_prompt=rng.randint(2, 3),
        max_staleness=rng.randint(0, 4),
        max_steps=rng.randint(1, 6),
        num_tasks=rng.randint(1, 9),
        num_engines=rng.randint(1, 3),
        sampler_seed=rng.randint(0, 9),
        generate=generate,
        train=durations(10),
        refit=durations(5),
        save=durations(20),
        max_replaced_per_step=rng.choice((0, 1, 3)) if may_drop else 0,
        evaluate=durations(40),
        evaluate_every=rng.choice((None, 1, 2)),
        is_pinned=rng.random() < 0.5,
        checkpoint_every=rng.choice((None, 1, 2)),
        keep_last=rng.randint(1, 2),
        # Most rollouts must be able to end in time, or every group is dropped for ever.
        deadline=rng.choice((None, 3 * generate.mean, 10 * generate.mean)) if may_drop else None,
        faults=Faults(
            infra_error=rate(0.3) if may_drop else 0.0,
            lost=rate(0.2) if may_drop else 0.0,
            nonfinite=rate(0.3) if may_drop else 0.0,
            duplicated=rate(0.3),
            late=rate(0.5),
            zero_signal=rate(0.5),
            engine_death=rate(0.1),
            disk_full=rate(0.3),
            not_attested=rate(0.4),
            crash=rng.choice((0.0, 0.01, 0.03, 0.1)),
            power_loss=rate(0.5),
            damaged=rate(0.3),
        ),
    )
