"""On every combination that LossConfig admits, the torch loss is the float64 oracle, however the batch is cut."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_material import (
    DISCRETE,
    Arrays,
    batches,
    combinations,
    configs,
    counts_of,
    has_rounded_decision,
    largest_term,
    make_batch,
    refusal,
    run_oracle,
)
from pydantic import ValidationError

from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch.loss import LossTerms, TokenBatch, policy_loss

LAWS = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def run_torch(
    config: LossConfig, batch: Arrays, counts: dict[str, int], *, dtype: torch.dtype = torch.float64
) -> tuple[LossTerms, np.ndarray, np.ndarray]:
    """Loss terms, and the gradients in logprobs and entropy as [B, T] with 0 at masked slots."""
    mask = batch["loss_mask"]
    at = {name: torch.from_numpy(array[mask]).to(dtype) for name, array in batch.items() if name != "loss_mask"}
    logprobs_M, entropy_M = at["logprobs"].requires_grad_(), at["entropy"].requires_grad_()
    tokens = TokenBatch(
        logprobs_M=logprobs_M,
        sampled_logprobs_M=at["sampled_logprobs"],
        proximal_logprobs_M=at["proximal_logprobs"] if config.proximal == "given" else None,
        ref_logprobs_M=at["ref_logprobs"],
        entropy_M=entropy_M,
        advantages_M=at["advantages"],
        sequence_M=torch.from_numpy(np.nonzero(mask)[0]),
        num_rows=len(mask),
    )
    terms = policy_loss(config, tokens, **counts)
    terms.loss.backward()
    grads = []
    for tensor in (logprobs_M, entropy_M):
        grads.append(np.zeros(mask.shape))
        if tensor.grad is not None:
            grads[-1][mask] = tensor.grad.numpy()
    return terms, grads[0], grads[1]


def assert_is_the_oracle(config: LossConfig, batch: Arrays, *, dtype: torch.dtype, rtol: float, unit: float) -> None:
    """Value, both gradients and every metric, within ``rtol`` or ``unit`` times the largest term."""
    wanted = run_oracle(config, batch)
    terms, grad, entropy_grad = run_torch(config, batch, counts_of(config, batch["loss_mask"]), dtype=dtype)
    atol = unit * largest_term(config, batch)
    assert terms.loss.item() == pytest.approx(wanted.loss, rel=rtol, abs=atol)
    np.testing.assert_allclose(grad, wanted.grad, rtol=rtol, atol=atol)
    np.testing.assert_allclose(entropy_grad, wanted.entropy_grad, rtol=rtol, atol=0)
    count = max(float(terms.sums["num_tokens"]), 1.0)
    got = {name: float(total) / count for name, total in terms.sums.items() if name != "num_tokens"}
    got["offpolicy_abs_diff_max"] = float(terms.offpolicy_abs_diff_max)
    got["mismatch_abs_diff_max"] = float(terms.mismatch_abs_diff_max)
    assert set(wanted.metrics) == set(got)
    for name, value in got.items():
        assert value == pytest.approx(wanted.metrics[name], rel=10 * rtol, abs=10 * rtol), name


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=() if one in ("clip", "gspo") else pytest.mark.ci) for one in DISCRETE["variant"]],
)
def test_every_combination_is_refused_for_a_reason_or_is_the_oracles(variant: str) -> None:
    num_checked = 0
    for number, options in enumerate(combinations()):
        if options["variant"] != variant:
            continue
        if refusal(options):
            with pytest.raises(ValidationError, match=refusal(options)):
                LossConfig(**options)
            continue
        config, batch = LossConfig(**options), make_batch(number)
        assert_is_the_oracle(config, batch, dtype=torch.float64, rtol=1e-9, unit=1e-14)
        num_checked += 1
    assert num_checked > 500


@LAWS
@given(configs(), batches)
def test_in_float64_value_gradients_and_metrics_are_the_oracles(config: LossConfig, batch: Arrays) -> None:
    assume(not has_rounded_decision(config, batch, 1e-12))
    assert_is_the_oracle(config, batch, dtype=torch.float64, rtol=1e-10, unit=1e-14)


@LAWS
@given(configs(), batches)
def test_in_float32_they_are_the_oracles_within_its_rounding(config: LossConfig, batch: Arrays) -> None:
    single = {name: array.astype(np.float32).astype(array.dtype) for name, array in batch.items()}
    assume(not has_rounded_decision(config, single, 1e-4))
    assert_is_the_oracle(config, single, dtype=torch.float32, rtol=2e-5, unit=1e-6)


@LAWS
@given(configs(), batches, st.data())
def test_micro_batches_add_up_to_the_batch_however_it_is_cut(
    config: LossConfig, batch: Arrays, data: st.DataObject
) -> None:
    """Sequences go to micro-batches in any way; counts are those of the whole step."""
    mask = batch["loss_mask"]
    counts = counts_of(config, mask)
    place = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask))))
    whole, grad, entropy_grad = run_torch(config, batch, counts)
    loss, sums, largest = 0.0, dict.fromkeys(whole.sums, 0.0), {"offpolicy": 0.0, "mismatch": 0.0}
    atol = 1e-14 * largest_term(config, batch)
    for number in range(4):
        rows = np.flatnonzero(place == number)
        part, part_grad, part_entropy_grad = run_torch(config, {n: a[rows] for n, a in batch.items()}, counts)
        np.testing.assert_allclose(part_grad, grad[rows], rtol=1e-12, atol=atol)
        np.testing.assert_allclose(part_entropy_grad, entropy_grad[rows], rtol=1e-12, atol=0)
        loss += part.loss.item()
        largest = {name: max(value, float(getattr(part, f"{name}_abs_diff_max"))) for name, value in largest.items()}
        sums = {name: sums[name] + float(part.sums[name]) for name in sums}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=atol)
    assert largest == {name: float(getattr(whole, f"{name}_abs_diff_max")) for name in largest}
    for name, total in sums.items():
        assert total == pytest.approx(float(whole.sums[name]), rel=1e-12, abs=1e-12), name
