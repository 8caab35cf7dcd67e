"""Which LossConfig is which paper's loss: each objective written out in plain numpy, value and gradient.

The formulas below are typed from the papers and use nothing of dockyard_core.loss; gradients are central differences
of them, with a paper's stop-gradient factors held at the point. Objectives are maximised, a loss is minimised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from dockyard_core.advantage import group_advantages
from dockyard_core.loss import LossOutput, policy_loss
from dockyard_core.loss_config import LossConfig

REWARDS = np.array([1.0, 0.0, 0.25, 1.0])
LENGTHS = (5, 2, 7, 4)
PI, REF, MU = np.array([0.3, 0.1, 0.6]), np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.5, 0.3])


@dataclass
class Group:
    """G completions of one prompt; o[i] holds the log-probabilities of completion i's tokens."""

    theta: list[np.ndarray]
    old: list[np.ndarray]
    prox: list[np.ndarray]
    ref: list[np.ndarray]
    rewards: np.ndarray = field(default_factory=lambda: REWARDS)

    @property
    def size(self) -> int:
        return len(self.theta)

    @property
    def num_tokens(self) -> int:
        return sum(len(o) for o in self.theta)

    def standardised(self) -> np.ndarray:
        return (self.rewards - self.rewards.mean()) / self.rewards.std(ddof=1)

    def centred(self) -> np.ndarray:
        return self.rewards - self.rewards.mean()


def make_group(seed: int) -> Group:
    rng = np.random.default_rng(seed)
    theta = [-rng.exponential(1.5, length) for length in LENGTHS]
    moved = [[o + rng.normal(0, 0.3, len(o)) for o in theta] for _ in range(3)]
    return Group(theta, *moved)


def padded(rows: list[np.ndarray], fill: float = np.nan) -> np.ndarray:
    array = np.full((len(rows), max(LENGTHS)), fill)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


def ours(config: LossConfig, group: Group, advantages: np.ndarray) -> LossOutput:
    return policy_loss(
        config,
        logprobs=padded(group.theta),
        sampled_logprobs=padded(group.old),
        proximal_logprobs=padded(group.prox) if config.proximal == "given" else None,
        ref_logprobs=padded(group.ref) if config.kl_coef else None,
        advantages=advantages,
        loss_mask=padded([np.ones(length) for length in LENGTHS], 0.0) > 0,
    )


def differences(objective: Callable[[Group], float], group: Group) -> np.ndarray:
    """Central differences of an objective in each log-probability of theta, [G, T]."""
    slopes = [np.zeros(length) for length in LENGTHS]
    for i, t in ((i, t) for i, length in enumerate(LENGTHS) for t in range(length)):
        value = group.theta[i][t]
        ends = []
        for step in (1e-6, -1e-6):
            group.theta[i][t] = value + step
            ends.append(objective(group))
        group.theta[i][t] = value
        slopes[i][t] = (ends[0] - ends[1]) / 2e-6
    return padded(slopes, 0.0)


def surrogate(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


# ---- the papers -----------------------------------------------------------------------------------


def grpo(group: Group) -> float:
    """DeepSeekMath, arXiv:2402.03300, eq. 3, with beta = 0.04."""
    total = 0.0
    for theta, old, ref, advantage in zip(group.theta, group.old, group.ref, group.standardised(), strict=True):
        kl = np.exp(ref - theta) - (ref - theta) - 1
        total += (surrogate(np.exp(theta - old), advantage, 0.2, 0.2) - 0.04 * kl).mean()
    return total / group.size


def dapo(group: Group) -> float:
    """DAPO, arXiv:2503.14476: one mean over all tokens, clip-higher, no KL."""
    rows = zip(group.theta, group.old, group.standardised(), strict=True)
    total = sum(surrogate(np.exp(theta - old), a, 0.2, 0.28).sum() for theta, old, a in rows)
    return total / group.num_tokens


def dr_grpo(group: Group) -> float:
    """Dr. GRPO, arXiv:2503.20783: no division by the length, none by the standard deviation."""
    rows = zip(group.theta, group.old, group.centred(), strict=True)
    return sum(surrogate(np.exp(theta - old), a, 0.2, 0.2).sum() for theta, old, a in rows) / group.size


def gspo(group: Group) -> float:
    """GSPO, arXiv:2507.18071, here with a range that some sequences stay inside of."""
    rows = zip(group.theta, group.old, group.standardised(), strict=True)
    ratios = [(np.exp((theta - old).mean()), a) for theta, old, a in rows]
    return float(np.mean([surrogate(s, a, 0.05, 0.08) for s, a in ratios]))


def cispo(group: Group, held: list[np.ndarray]) -> float:
    """CISPO, arXiv:2506.13585, with no lower bound; ``held`` are the stopped ratios."""
    rows = zip(held, group.theta, group.standardised(), strict=True)
    return sum((np.minimum(ratio, 1.2) * a * theta).sum() for ratio, theta, a in rows) / group.num_tokens


def rloo(group: Group) -> float:
    """RLOO, arXiv:2402.14740: each reward less the mean of the others, on the whole sequence's log-probability."""
    total = 0.0
    for i, theta in enumerate(group.theta):
        others = [reward for j, reward in enumerate(group.rewards) if j != i]
        total += (group.rewards[i] - np.mean(others)) * theta.sum()
    return total / group.size


def decoupled_ppo(group: Group) -> float:
    """AReaL, arXiv:2505.24298: the clip is centred on pi_prox, and pi_prox / pi_behav weighs it."""
    total = 0.0
    for theta, old, prox, advantage in zip(group.theta, group.old, group.prox, group.standardised(), strict=True):
        total += (np.exp(prox - old) * surrogate(np.exp(theta - prox), advantage, 0.2, 0.2)).sum()
    return total / group.num_tokens


def log_likelihood(group: Group) -> float:
    """Supervised fine-tuning: the mean log-likelihood of the trained tokens."""
    return sum(theta.sum() for theta in group.theta) / group.num_tokens


STANDARDISED = {"baseline": "mean", "scale": "std"}
TO_SAMPLER = {"proximal": "bypass"}
RECIPES = {
    "GRPO": (grpo, TO_SAMPLER | {"kl_coef": 0.04, "aggregation": "sequence"}, STANDARDISED, 1),
    "DAPO": (dapo, TO_SAMPLER | {"clip_high": 0.28}, STANDARDISED, 1),
    "Dr. GRPO": (
        dr_grpo, TO_SAMPLER | {"aggregation": "dr_grpo", "max_tokens": 64}, {"baseline": "mean", "scale": "none"}, 64
    ),
    "GSPO": (gspo, TO_SAMPLER | {"variant": "gspo", "clip_low": 0.05, "clip_high": 0.08}, STANDARDISED, 1),
    "RLOO": (
        rloo,
        {"variant": "reinforce", "correction": "none", "aggregation": "dr_grpo", "max_tokens": 1},
        {"baseline": "leave_one_out", "scale": "none"},
        1,
    ),
    "decoupled PPO": (decoupled_ppo, {"proximal": "given", "correction": "is"}, STANDARDISED, 1),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.parametrize("paper", RECIPES)
def test_a_recipe_is_the_papers_objective(paper, seed) -> None:
    """Loss = -objective / scale, value and gradient; the scale is Dr. GRPO's constant length, and else 1."""
    objective, options, advantage_options, scale = RECIPES[paper]
    group = make_group(seed)
    out = ours(LossConfig(**options), group, group_advantages(group.rewards, **advantage_options))
    assert out.loss == pytest.approx(-objective(group) / scale, abs=1e-12)
    np.testing.assert_allclose(out.grad, -differences(objective, group) / scale, atol=1e-8)
    if options.get("variant") != "reinforce":
        assert 0 < out.metrics["clip_fraction"] < 1  # else the comparison would say nothing of the bounds


def test_the_cispo_recipe_is_the_papers_objective_with_its_ratio_stopped() -> None:
    group = make_group(0)
    held = [np.exp(theta - old) for theta, old in zip(group.theta, group.old, strict=True)]
    config = LossConfig(variant="cispo", cispo_max=1.2, proximal="bypass")
    out = ours(config, group, group_advantages(group.rewards, **STANDARDISED))
    assert out.loss == pytest.approx(-cispo(group, held), abs=1e-12)
    np.testing.assert_allclose(out.grad, -differences(lambda moved: cispo(moved, held), group), atol=1e-8)
    assert 0 < out.metrics["clip_fraction"] < 1


def test_supervised_fine_tuning_is_reinforce_with_advantage_one() -> None:
    group = make_group(0)
    out = ours(LossConfig(variant="reinforce", correction="none"), group, np.ones(group.size))
    assert out.loss == pytest.approx(-log_likelihood(group), abs=1e-12)
    np.testing.assert_allclose(out.grad, -differences(log_likelihood, group), atol=1e-8)


def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_one() -> None:
    """Why the default baseline changes DeepSeekMath's advantage by a constant factor, and nothing else."""
    ours_G = group_advantages(REWARDS)
    np.testing.assert_allclose(ours_G, make_group(0).standardised() * len(REWARDS) / (len(REWARDS) - 1), atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_at_the_first_update_the_default_has_the_gradient_of_clipping_to_a_recompute(seed) -> None:
    group = make_group(seed)
    advantages = group_advantages(group.rewards)
    group.prox = [theta.copy() for theta in group.theta]
    current = ours(LossConfig(), group, advantages)
    given = ours(LossConfig(proximal="given"), group, advantages)
    assert current.loss == given.loss
    np.testing.assert_array_equal(current.grad, given.grad)


@pytest.mark.parametrize("seed", range(3))
def test_the_default_is_a_policy_gradient_weighted_by_truncated_importance(seed) -> None:
    """-1/N sum min(pi / mu, 2) A log pi, the weight stopped: what the default is when nothing is clipped."""
    group = make_group(seed)
    advantages = group_advantages(group.rewards)
    held = [np.minimum(np.exp(theta - old), 2.0) for theta, old in zip(group.theta, group.old, strict=True)]

    def objective(moved: Group) -> float:
        rows = zip(held, moved.theta, advantages, strict=True)
        return sum((weight * a * theta).sum() for weight, theta, a in rows) / moved.num_tokens

    np.testing.assert_allclose(ours(LossConfig(), group, advantages).grad, -differences(objective, group), atol=1e-8)


# ---- expectations on three symbols ----------------------------------------------------------------


def one_symbol(config: LossConfig, *, policy: float, sampler: float, ref: float) -> LossOutput:
    """The loss of one token, given its probability under each policy."""
    return policy_loss(
        config,
        logprobs=np.log([[policy]]),
        sampled_logprobs=np.log([[sampler]]),
        ref_logprobs=np.log([[ref]]),
        advantages=np.zeros(1),
        loss_mask=np.ones((1, 1), bool),
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_off_policy_the_score_form_still_has_the_gradient_of_the_kl(estimator) -> None:
    """Symbols drawn from another policy mu: E_mu of the gradient is that of KL(pi || ref), exactly."""
    config = LossConfig(kl_coef=1.0, kl_estimator=estimator, kl_gradient="score", correction="is")
    slope = np.zeros(3)
    for symbol in range(3):
        out = one_symbol(config, policy=PI[symbol], sampler=MU[symbol], ref=REF[symbol])
        slope += MU[symbol] * out.grad[0, 0] * (np.eye(3)[symbol] - PI)
    kl = (PI * np.log(PI / REF)).sum()
    np.testing.assert_allclose(slope, PI * (np.log(PI / REF) - kl), atol=1e-12)


def test_plain_k3_has_the_gradient_of_the_forward_kl() -> None:
    """On-policy, E[(1 - ref / pi) grad log pi] = -grad of E_ref[log pi], which is pi - ref in the logits."""
    config = LossConfig(kl_coef=1.0, correction="none")
    slope = np.zeros(3)
    for symbol in range(3):
        out = one_symbol(config, policy=PI[symbol], sampler=PI[symbol], ref=REF[symbol])
        slope += PI[symbol] * out.grad[0, 0] * (np.eye(3)[symbol] - PI)
    np.testing.assert_allclose(slope, PI - REF, atol=1e-12)


def test_the_mismatch_estimate_has_the_expectation_of_the_kl() -> None:
    outs = [one_symbol(LossConfig(), policy=p, sampler=q, ref=1.0) for p, q in zip(PI, MU, strict=True)]
    estimate = sum(q * out.metrics["kl_sampled_proximal"] for q, out in zip(MU, outs, strict=True))
    assert estimate == pytest.approx((MU * np.log(MU / PI)).sum(), abs=1e-12)
    assert all(out.metrics["kl_sampled_proximal"] >= 0 for out in outs)
