import re
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_material import CONFIGS, GSPO

from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch.loss import TokenBatch, policy_loss


def make_arrays(seed: int, *, spread: float = 0.3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (5, 7)
    logprobs = rng.normal(-1.5, 0.5, shape)
    mask = rng.random(shape) < 0.7
    mask[3] = False
    return {
        "logprobs": logprobs,
        "sampled_logprobs": logprobs + rng.normal(0, spread, shape),
        "proximal_logprobs": logprobs + rng.normal(0, spread, shape),
        "ref_logprobs": logprobs + rng.normal(0, spread, shape),
        "entropy": rng.uniform(0, 2, shape),
        "advantages": rng.normal(0, 1, shape),
        "loss_mask": mask,
    }


def torch_side(config: LossConfig, arrays: dict[str, np.ndarray], **counts: int):
    mask = arrays["loss_mask"]
    tensors = {name: torch.from_numpy(array[mask]) for name, array in arrays.items() if name != "loss_mask"}
    tensors["logprobs"].requires_grad_()
    tensors["entropy"].requires_grad_()
    terms = policy_loss(
        config,
        TokenBatch(
            logprobs_M=tensors["logprobs"],
            sampled_logprobs_M=tensors["sampled_logprobs"],
            proximal_logprobs_M=tensors["proximal_logprobs"],
            ref_logprobs_M=tensors["ref_logprobs"],
            entropy_M=tensors["entropy"],
            advantages_M=tensors["advantages"],
            sequence_M=torch.from_numpy(np.nonzero(mask)[0]),
            num_rows=len(mask),
        ),
        **counts,
    )
    terms.loss.backward()
    return terms, tensors


def counts_of(config: LossConfig, mask: np.ndarray) -> dict[str, int]:
    num_sequences = int(mask.any(axis=1).sum()) if config.effective_aggregation == "sequence" else len(mask)
    return {"num_valid_tokens": int(mask.sum()), "num_sequences": num_sequences}


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@pytest.mark.parametrize("spread", [0.05, 0.3, 40.0])
def test_value_gradient_and_metrics_are_the_oracles(options, spread) -> None:
    config = LossConfig(**options)
    for seed in range(4):
        arrays = make_arrays(seed, spread=spread)
        given = arrays if config.proximal == "given" else arrays | {"proximal_logprobs": None}
        wanted = oracle(config, **given)
        mask = arrays["loss_mask"]
        terms, tensors = torch_side(config, arrays, **counts_of(config, mask))
        # With exponents at their clamp, e^20 cancels against itself in k3's gradient: eight digits go.
        rtol = 1e-8 if spread > 1 else 1e-12
        assert terms.loss.item() == pytest.approx(wanted.loss, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(tensors["logprobs"].grad, wanted.grad[mask], rtol=rtol, atol=1e-13)
        entropy_grad = tensors["entropy"].grad
        if config.entropy_coef:
            np.testing.assert_allclose(entropy_grad, wanted.entropy_grad[mask], rtol=1e-12)
        else:
            assert entropy_grad is None
        for name, total in terms.sums.items():
            if name != "num_tokens":
                assert float(total) / mask.sum() == pytest.approx(wanted.metrics[name], rel=1e-9, abs=1e-12), name
        for name in ("offpolicy_abs_diff_max", "mismatch_abs_diff_max"):
            assert float(getattr(terms, name)) == pytest.approx(wanted.metrics[name])


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_trained_token_gives_zero_loss_and_an_empty_gradient(options) -> None:
    arrays = make_arrays(0)
    arrays["loss_mask"] = np.zeros_like(arrays["loss_mask"])
    terms, tensors = torch_side(LossConfig(**options), arrays, num_valid_tokens=0, num_sequences=0)
    assert terms.loss.item() == 0.0
    assert tensors["logprobs"].grad.shape == (0,)
    assert float(terms.offpolicy_abs_diff_max) == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_flows_exactly_at_a_clip_edge_as_in_the_oracle(advantage) -> None:
    # A range of no width around a ratio of 1: the only edge on which no rounding can be off.
    config = LossConfig(proximal="given", correction="none", clip_low=0.0, clip_high=0.0)
    one = np.full((1, 1), -1.0)
    arrays = dict.fromkeys(make_arrays(0), one) | {
        "advantages": np.full((1, 1), advantage),
        "loss_mask": np.ones((1, 1), bool),
    }
    _, tensors = torch_side(config, arrays, num_valid_tokens=1, num_sequences=1)
    assert oracle(config, **arrays).grad[0, 0] == -advantage
    assert float(tensors["logprobs"].grad) == -advantage


def one_token(
    config: LossConfig, *, sampled: float, ref: float, advantage: float, dtype: torch.dtype
) -> tuple[float, float, float, float]:
    """Loss and gradient of one token with logprob -1: torch's, the oracle's, torch's, the oracle's."""
    arrays = {"logprobs": -1.0, "sampled_logprobs": sampled, "ref_logprobs": ref, "advantages": advantage}
    at = {name: torch.full((1,), value, dtype=dtype) for name, value in arrays.items()}
    at["logprobs"].requires_grad_()
    tokens = TokenBatch(
        **{f"{name}_M": tensor for name, tensor in at.items()}, sequence_M=torch.tensor([0]), num_rows=1
    )
    loss = policy_loss(config, tokens, num_valid_tokens=1, num_sequences=1).loss
    loss.backward()
    rounded = {name: tensor.detach().double().numpy()[None] for name, tensor in at.items()}
    with np.errstate(invalid="ignore"):
        wanted = oracle(config, **rounded, loss_mask=np.ones((1, 1), bool))
    return loss.item(), wanted.loss, at["logprobs"].grad.item(), wanted.grad[0, 0]


@pytest.mark.parametrize("gap", [1e-6, 1e-3, 0.1, 3.0, 12.0, 20.0, 40.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gradient", ["plain", "score"])
def test_the_kl_gradient_keeps_its_digits_in_float32_near_the_reference_and_far_from_it(gap, sign, gradient) -> None:
    """Autograd of e^d - 1 - d would leave 6e-8 / d of them near it, and the score form none at the clamp."""
    config = LossConfig(kl_coef=1.0, kl_gradient=gradient, correction="none")
    _, _, grad, wanted = one_token(config, sampled=-1.0, ref=-1.0 + sign * gap, advantage=0.0, dtype=torch.float32)
    assert grad == pytest.approx(wanted, rel=3e-7)


@pytest.mark.parametrize("options", [{}, {"proximal": "bypass"}, {"kl_coef": 0.1}, {"correction": "is"}, GSPO], ids=str)
@pytest.mark.parametrize("sampled", [-np.inf, -1.0])
def test_an_infinite_gap_is_clamped_like_any_other(options, sampled) -> None:
    config = LossConfig(**options)
    loss, wanted_loss, grad, wanted_grad = one_token(
        config, sampled=sampled, ref=-np.inf, advantage=1.0, dtype=torch.float64
    )
    assert np.isfinite([loss, grad]).all()
    assert (loss, grad) == (pytest.approx(wanted_loss), pytest.approx(wanted_grad))


def test_a_bounded_kl_keeps_its_value_in_float32_when_the_estimate_is_huge() -> None:
    config = LossConfig(kl_coef=1.0, kl_max=0.1, correction="none")
    logprobs_M = torch.tensor([-30.0], requires_grad=True)
    tokens = TokenBatch(
        logprobs_M=logprobs_M,
        sampled_logprobs_M=torch.tensor([-30.0]),
        ref_logprobs_M=torch.tensor([-0.5]),
        advantages_M=torch.zeros(1),
        sequence_M=torch.tensor([0]),
        num_rows=1,
    )
    terms = policy_loss(config, tokens, num_valid_tokens=1, num_sequences=1)
    assert terms.loss.item() == pytest.approx(0.1)


PAGE = Path(__file__).parents[3] / "docs/design-docs/grpo-and-loss.md"


def test_every_test_that_the_page_on_the_loss_names_exists() -> None:
    named = set(re.findall(r"(test_\w+\.py)::(\w+)", PAGE.read_text()))
    assert len(named) > 40
    sources = {path.name: path.read_text() for path in PAGE.parents[2].glob("packages/*/tests/test_*.py")}
    assert [f"{file}::{test}" for file, test in sorted(named) if f"\ndef {test}(" not in sources.get(file, "")] == []


def test_every_section_of_that_page_names_its_tests() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [section.partition("\n")[0] for section in sections if ".py::test_" not in section] == []
