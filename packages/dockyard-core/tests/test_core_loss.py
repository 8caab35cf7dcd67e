import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core.loss import policy_loss
from dockyard_core.loss_config import LossConfig

CONFIGS = [
    {},
    {"variant": "clip", "clip_low": 0.1, "clip_high": 0.3, "correction": "none"},
    {"dual_clip": 1.5, "correction": "is"},
    {"variant": "cispo", "cispo_max": 1.2, "correction": "icepop"},
    {"variant": "gspo", "clip_low": 0.05, "clip_high": 0.05, "correction": "seq_mask", "seq_low": 0.9, "seq_high": 1.2},
    {"variant": "reinforce", "correction": "tis", "tis_max": 1.1},
    {"kl_coef": 0.3},
    {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1},
    {"kl_coef": 0.3, "kl_gradient": "score", "kl_max": 0.4},
    {"kl_coef": 0.3, "kl_estimator": "k1", "kl_gradient": "score", "aggregation": "sequence"},
    {"aggregation": "dr_grpo", "max_tokens": 9},
]


def make_batch(seed: int, num_rows: int = 4, num_tokens: int = 6, *, proximal: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_tokens)
    logprobs = rng.normal(-1.5, 0.5, shape)
    batch = {
        "logprobs": logprobs,
        "sampled_logprobs": logprobs + rng.normal(0, 0.3, shape),
        "ref_logprobs": logprobs + rng.normal(0, 0.5, shape),
        "entropy": rng.uniform(0, 2, shape),
        "advantages": rng.normal(0, 1, num_rows),
        "loss_mask": rng.random(shape) < 0.7,
    }
    return batch | ({"proximal_logprobs": logprobs + rng.normal(0, 0.3, shape)} if proximal else {})


def one_token(config: LossConfig, *, ratio: float = 1.0, advantage: float = 1.0, behaviour: float = 1.0) -> tuple:
    """Loss and gradient of one token with the given pi/pi_old and pi_old/mu."""
    proximal = np.full((1, 1), -1.0)
    out = policy_loss(
        config,
        logprobs=proximal + np.log(ratio),
        proximal_logprobs=proximal,
        sampled_logprobs=proximal - np.log(behaviour),
        advantages=np.array([advantage]),
        loss_mask=np.ones((1, 1), bool),
    )
    return pytest.approx(out.loss, abs=1e-12), pytest.approx(out.grad[0, 0], abs=1e-12), out.metrics["clip_fraction"]


GIVEN = {"proximal": "given", "correction": "none"}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 1.0, -1.28, 0.0, 1),  # above 1 + clip_high: no reason to go on
        (1.5, -1.0, 1.5, 1.5, 0),  # but a mistake is still corrected
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        (0.5, 0.0, 0.0, 0.0, 0),
        (4.0, -1.0, 4.0, 4.0, 0),
    ],
)
def test_clip_has_the_hand_computed_value_and_gradient(ratio, advantage, loss, grad, clipped) -> None:
    config = LossConfig(**GIVEN, clip_low=0.2, clip_high=0.28)
    assert one_token(config, ratio=ratio, advantage=advantage) == (loss, grad, clipped)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.25, 1.0), (0.75, -1.0)])
def test_the_gradient_flows_exactly_at_a_clip_edge(ratio, advantage) -> None:
    edge = float(np.exp((-1.0 + np.log(ratio)) - -1.0))  # the ratio that one_token really makes
    config = LossConfig(**GIVEN, clip_low=max(0.0, 1 - edge), clip_high=max(0.0, edge - 1))
    assert one_token(config, ratio=ratio, advantage=advantage)[1:] == (-ratio * advantage, 0.0)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    config = LossConfig(**GIVEN, dual_clip=3.0)
    assert one_token(config, ratio=5.0, advantage=-2.0) == (6.0, 0.0, 1.0)
    assert one_token(config, ratio=2.0, advantage=-2.0) == (4.0, 4.0, 0.0)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    config = LossConfig(**GIVEN, variant="cispo", cispo_max=3.0)
    loss, grad, clipped = one_token(config, ratio=5.0, advantage=2.0)
    assert (loss, grad, clipped) == (-6.0 * (-1.0 + np.log(5.0)), -6.0, 1.0)
    assert one_token(config, ratio=2.0, advantage=2.0)[1] == -4.0


@pytest.mark.parametrize(
    ("options", "behaviour", "weight"),
    [
        ({"correction": "none"}, 3.0, 1.0),
        ({"correction": "is"}, 3.0, 3.0),
        ({"correction": "tis", "tis_max": 2.0}, 3.0, 2.0),
        ({"correction": "tis", "tis_max": 2.0}, 0.1, 0.1),
        ({"correction": "icepop"}, 3.0, 0.0),
        ({"correction": "icepop"}, 0.4, 0.0),
        ({"correction": "icepop"}, 1.5, 1.5),
        ({"correction": "seq_mask"}, 1.02, 0.0),
        ({"correction": "seq_mask"}, 1.005, 1.005),
        ({"correction": "is"}, 1e12, np.exp(20.0)),  # clamped, not turned into 0
    ],
)
def test_correction_weights_the_policy_term(options, behaviour, weight) -> None:
    config = LossConfig(proximal="given", **options)
    loss, grad, _ = one_token(config, behaviour=behaviour)
    assert (loss, grad) == (-weight, -weight)


def test_bypass_puts_the_sampler_in_the_ratio_and_corrects_nothing() -> None:
    batch = make_batch(0)
    bypass = policy_loss(LossConfig(proximal="bypass", correction="tis"), **batch)
    given = policy_loss(LossConfig(**GIVEN), **batch, proximal_logprobs=batch["sampled_logprobs"])
    assert bypass.loss == given.loss
    np.testing.assert_array_equal(bypass.grad, given.grad)


def test_proximal_current_has_ratio_one_and_the_gradient_of_given_at_the_same_point() -> None:
    batch = make_batch(1)
    current = policy_loss(LossConfig(), **batch)
    given = policy_loss(LossConfig(proximal="given"), **batch, proximal_logprobs=batch["logprobs"])
    assert current.loss == given.loss
    np.testing.assert_array_equal(current.grad, given.grad)
    assert current.metrics["clip_fraction"] == 0


def test_gspo_is_the_clipped_surrogate_of_the_length_normalised_ratio() -> None:
    config = LossConfig(variant="gspo", clip_low=0.1, clip_high=0.1, **GIVEN)
    log_ratios, mask = np.array([[0.03, 0.05, 9.0], [0.4, 0.2, 0.0]]), np.array([[1, 1, 0], [1, 1, 1]], bool)
    proximal = np.full((2, 3), -1.0)
    out = policy_loss(
        config,
        logprobs=proximal + log_ratios,
        proximal_logprobs=proximal,
        sampled_logprobs=proximal,
        advantages=np.array([2.0, 1.0]),
        loss_mask=mask,
    )
    s = np.exp(0.04)  # row 0 inside its range; row 1, exp(0.2), above it
    assert out.loss == pytest.approx((-2 * s - 1.1) / 2)
    np.testing.assert_allclose(out.grad, [[-s / 2, -s / 2, 0], [0, 0, 0]], atol=1e-12)


# cispo and the score form hold detached factors: there the value's slope is not the gradient.
@pytest.mark.parametrize(
    "options", [c for c in CONFIGS if c.get("variant") != "cispo" and c.get("kl_gradient") != "score"], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_finite_difference_of_the_value(options, seed) -> None:
    config = LossConfig(**options, proximal="given")
    batch = make_batch(seed, proximal=True)
    out = policy_loss(config, **batch)
    for index in np.ndindex(out.grad.shape):
        step = np.zeros(out.grad.shape)
        step[index] = 1e-6
        high = policy_loss(config, **batch | {"logprobs": batch["logprobs"] + step}).loss
        low = policy_loss(config, **batch | {"logprobs": batch["logprobs"] - step}).loss
        assert out.grad[index] == pytest.approx((high - low) / 2e-6, abs=1e-7)


def expected_kl_gradient(estimator: str, gradient: str) -> tuple[float, np.ndarray, float, np.ndarray]:
    """Expected estimate and gradient in the logits of a 3-symbol policy, against KL and its gradient."""
    logits, ref = np.array([0.3, -0.5, 0.9]), np.array([0.5, 0.2, 0.3])
    probs = np.exp(logits) / np.exp(logits).sum()
    config = LossConfig(kl_coef=1.0, kl_estimator=estimator, kl_gradient=gradient, correction="none")
    value, slope = 0.0, np.zeros(3)
    for symbol in range(3):
        out = policy_loss(
            config,
            logprobs=np.log(probs[[[symbol]]]),
            sampled_logprobs=np.log(probs[[[symbol]]]),
            ref_logprobs=np.log(ref[[[symbol]]]),
            advantages=np.zeros(1),
            loss_mask=np.ones((1, 1), bool),
        )
        value += probs[symbol] * out.loss
        slope += probs[symbol] * out.grad[0, 0] * (np.eye(3)[symbol] - probs)
    kl = float((probs * np.log(probs / ref)).sum())
    return value, slope, kl, probs * (np.log(probs / ref) - kl)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_and_their_score_form_has_the_gradient_of_the_kl(estimator) -> None:
    value, slope, kl, kl_slope = expected_kl_gradient(estimator, "score")
    assert value == pytest.approx(kl, abs=1e-12)
    np.testing.assert_allclose(slope, kl_slope, atol=1e-12)


def test_plain_k2_has_the_gradient_of_the_kl() -> None:
    _, slope, _, kl_slope = expected_kl_gradient("k2", "plain")
    np.testing.assert_allclose(slope, kl_slope, atol=1e-12)


def test_k3_is_never_negative_and_points_the_right_way() -> None:
    config = LossConfig(kl_coef=1.0, correction="none")
    for ref, expected in [(-0.5, np.exp(0.5) - 1.5), (-1.5, np.exp(-0.5) - 0.5), (-1.0, 0.0)]:
        out = policy_loss(
            config,
            logprobs=np.full((1, 1), -1.0),
            sampled_logprobs=np.full((1, 1), -1.0),
            ref_logprobs=np.full((1, 1), ref),
            advantages=np.zeros(1),
            loss_mask=np.ones((1, 1), bool),
        )
        assert out.loss == pytest.approx(expected, abs=1e-12)
        assert out.metrics["kl_ref"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"aggregation": "token"}, (1 + 1 + 1 + 5) / 4),
        ({"aggregation": "sequence"}, (1 + 5) / 2),
        ({"aggregation": "dr_grpo", "max_tokens": 10}, (1 + 1 + 1 + 5) / (3 * 10)),
    ],
)
def test_aggregation_divides_as_defined(options, expected) -> None:
    out = policy_loss(
        LossConfig(variant="clip", correction="none", **options),
        logprobs=np.zeros((3, 3)),
        sampled_logprobs=np.zeros((3, 3)),
        advantages=-np.array([1.0, 5.0, 7.0]),
        loss_mask=np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]], bool),  # the last row has no trained token
    )
    assert out.loss == pytest.approx(expected)


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), cut=st.integers(1, 3))
def test_splitting_a_batch_changes_neither_loss_nor_gradient(options, seed, cut) -> None:
    config, batch = LossConfig(**options), make_batch(seed)
    counts = {
        "num_valid_tokens": int(batch["loss_mask"].sum()),
        "num_sequences": 4 if config.aggregation == "dr_grpo" else int(batch["loss_mask"].any(axis=1).sum()),
    }
    whole = policy_loss(config, **batch)
    parts = [
        policy_loss(config, **{name: array[rows] for name, array in batch.items()}, **counts)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, abs=1e-12)
    np.testing.assert_allclose(np.concatenate([part.grad for part in parts]), whole.grad, atol=1e-14)


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_slots_may_hold_anything(options, poison) -> None:
    config, batch = LossConfig(**options), make_batch(5)
    clean = policy_loss(config, **batch)
    mask = batch["loss_mask"]
    arrays = ("logprobs", "sampled_logprobs", "ref_logprobs", "entropy")
    dirty = batch | {name: np.where(mask, batch[name], poison) for name in arrays}
    dirty["advantages"] = np.where(mask, batch["advantages"][:, None], poison)
    out = policy_loss(config, **dirty)
    assert out.loss == clean.loss
    assert out.metrics == clean.metrics
    np.testing.assert_array_equal(out.grad, clean.grad)
    assert (out.grad[~mask] == 0).all()


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_trained_token_gives_zero_loss_and_zero_gradient(options) -> None:
    batch = make_batch(0) | {"loss_mask": np.zeros((4, 6), bool)}
    out = policy_loss(LossConfig(**options), **batch)
    assert out.loss == 0.0
    assert (out.grad == 0).all()
    assert set(out.metrics.values()) == {0.0}


def test_rejected_tokens_stay_in_the_denominator() -> None:
    out = policy_loss(
        LossConfig(correction="icepop"),
        logprobs=np.zeros((1, 2)),
        sampled_logprobs=np.array([[0.0, -5.0]]),
        advantages=np.ones(1),
        loss_mask=np.ones((1, 2), bool),
    )
    assert out.loss == -0.5


def test_the_entropy_bonus_is_reported_with_its_own_gradient() -> None:
    batch = make_batch(2)
    config = LossConfig(entropy_coef=0.1)
    out, without = policy_loss(config, **batch), policy_loss(LossConfig(), **batch)
    num_tokens = batch["loss_mask"].sum()
    assert out.loss == pytest.approx(without.loss - 0.1 * batch["entropy"][batch["loss_mask"]].mean())
    np.testing.assert_allclose(out.entropy_grad, np.where(batch["loss_mask"], -0.1 / num_tokens, 0.0))


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"proximal": "given"}, {}, "required exactly when"),
        ({}, {"proximal_logprobs": np.zeros((4, 6))}, "required exactly when"),
        ({"kl_coef": 0.1}, {"ref_logprobs": None}, "needs ref_logprobs"),
        ({"entropy_coef": 0.1}, {"entropy": None}, "needs entropy"),
        ({}, {"sampled_logprobs": np.zeros((4, 5))}, "must have the mask's shape"),
    ],
)
def test_missing_and_misshapen_arrays_are_refused(options, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(LossConfig(**options), **make_batch(0) | change)
