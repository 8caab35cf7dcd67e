import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.logprobs import chunked_logprobs


def make_sequences(seed: int, count: int, *, longest: int = 30, vocab_size: int = 64) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    made = []
    for num_tokens in rng.integers(1, longest, count):
        mask = np.arange(num_tokens) >= rng.integers(1, num_tokens + 1)
        made.append(
            TrainSequence(
                token_ids_T=rng.integers(0, vocab_size, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.full(num_tokens, -4.0, np.float32),
                advantage=float(rng.normal()),
            )
        )
    return made


def plain(hidden_MD, weight_VD, targets_M, temperature):
    """The textbook computation, all logits at once."""
    log_probs_MV = (hidden_MD @ weight_VD.T / temperature).log_softmax(-1)
    entropy_M = -(log_probs_MV.exp() * log_probs_MV).sum(-1)
    return log_probs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 64, 1000])
@pytest.mark.parametrize("use_entropy", [True, False])
def test_chunks_change_neither_values_nor_gradients(temperature, chunk_tokens, use_entropy) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(50, 8, generator=generator).requires_grad_()
    weight_VD = torch.randn(30, 8, generator=generator).requires_grad_()
    targets_M = torch.randint(0, 30, (50,), generator=generator)
    pull_M, entropy_pull_M = torch.randn(2, 50, generator=generator)

    def gradients(logprobs_M, entropy_M):
        total = (logprobs_M * pull_M).sum() + (entropy_M * entropy_pull_M).sum() * use_entropy
        return torch.autograd.grad(total, [hidden_MD, weight_VD])

    wanted = plain(hidden_MD, weight_VD, targets_M, temperature)
    got = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=temperature, chunk_tokens=chunk_tokens)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(*got), gradients(*wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 2])  # None: the tiles are kept for the backward pass
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_is_the_finite_difference_in_float64(chunk_tokens, with_entropy) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()

    def outputs(hidden_MD, weight_VD):
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_MD,
            weight_VD,
            torch.tensor([0, 6, 2, 2, 5]),
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )
        assert logprobs_M.dtype == torch.float64
        return (logprobs_M, entropy_M) if with_entropy else logprobs_M

    # A second backward pass makes the logits again where the first one had them kept: equal but for rounding.
    assert torch.autograd.gradcheck(outputs, (hidden_MD, weight_VD), nondet_tol=1e-12)


def random_inputs(num_positions=40, vocab_size=30, width=8, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_MD = torch.randn(num_positions, width, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab_size, width, generator=generator).to(dtype).requires_grad_()
    return hidden_MD, weight_VD, torch.randint(0, vocab_size, (num_positions,), generator=generator)


def test_scoring_without_entropy_gives_the_same_logprobs_and_no_graph() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs()
    logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.9)
    with torch.no_grad():
        scored_M, nothing = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.9, with_entropy=False)
        rescored_M, reentropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.9, chunk_tokens=3)
    assert nothing is None
    assert not scored_M.requires_grad
    for one, other in ((scored_M, logprobs_M), (rescored_M, logprobs_M), (reentropy_M, entropy_M)):
        torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-6)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs(64, 512, 4)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            results = func(*args, **(kwargs or {}))
            for result in results if isinstance(results, tuple | list) else [results]:
                largest = max(largest, result.numel() if isinstance(result, torch.Tensor) else 0)
            return results

    with Sizes():
        logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.0, chunk_tokens=5)
        (logprobs_M + entropy_M).sum().backward()
    assert 4 * 512 < largest <= 5 * 512, "a tile: larger than the gradient of the weight, and the bound asked for"


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_positions_without_a_gradient_neither_count_nor_spoil_the_others(chunk_tokens) -> None:
    hidden_MD, weight_VD, targets_M = random_inputs()
    spoiled_MD = hidden_MD.detach().clone()
    spoiled_MD[4], spoiled_MD[17, 2], spoiled_MD[30, 0] = torch.nan, torch.inf, -torch.inf
    spoiled_MD.requires_grad_()
    is_sound_M = spoiled_MD.detach().isfinite().all(-1)

    def run(hidden_MD):
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_MD, weight_VD, targets_M, temperature=0.8, chunk_tokens=chunk_tokens
        )
        total = torch.where(is_sound_M, logprobs_M + 0.3 * entropy_M, 0.0).sum()
        return logprobs_M, entropy_M, *torch.autograd.grad(total, [hidden_MD, weight_VD])

    *values, grad_MD, grad_VD = run(spoiled_MD)
    *wanted, wanted_MD, wanted_VD = run(hidden_MD)
    for one, other in zip(values, wanted, strict=True):
        assert not one[~is_sound_M].isfinite().any()
        torch.testing.assert_close(one[is_sound_M], other[is_sound_M])
    torch.testing.assert_close(grad_MD, wanted_MD)
    torch.testing.assert_close(grad_VD, wanted_VD)
    assert not grad_MD[~is_sound_M].any()


def test_a_position_that_is_not_finite_spoils_no_other_positions_gradient() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs()
    spoiled_MD = hidden_MD.detach().clone().index_fill_(0, torch.tensor([4]), torch.nan).requires_grad_()
    grads = []
    for one_MD in (hidden_MD, spoiled_MD):
        logprobs_M, entropy_M = chunked_logprobs(one_MD, weight_VD, targets_M, temperature=1.0, chunk_tokens=3)
        grads += torch.autograd.grad((logprobs_M + entropy_M).sum(), one_MD)
    rest = torch.arange(40) != 4
    torch.testing.assert_close(grads[0][rest], grads[1][rest])


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize(("scale", "temperature"), [(1e4, 1.0), (1e2, 1e-2), (1.0, 1e-2)])
def test_huge_logits_are_as_exact_as_their_rounding_allows(chunk_tokens, scale, temperature) -> None:
    # Hidden states pick a column of the weight, so the logits are numbers that float32 holds exactly.
    logits_MV = torch.tensor([[-1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -0.5]]) * scale
    hidden_MD, weight_VD, targets_M = torch.eye(3).requires_grad_(), logits_MV.T.contiguous(), torch.tensor([2, 1, 3])
    exact = logits_MV.double().requires_grad_()
    got = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=temperature, chunk_tokens=chunk_tokens)
    wanted = plain(torch.eye(3).double(), exact.T, targets_M, temperature)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    (grad_MD,) = torch.autograd.grad(sum(value.sum() for value in got), hidden_MD)
    (grad_MV,) = torch.autograd.grad(sum(value.sum() for value in wanted), exact)
    torch.testing.assert_close(grad_MD.double(), grad_MV @ weight_VD.double(), rtol=1e-5, atol=1e-5 * scale)


def test_equal_logits_are_uniform_at_any_height() -> None:
    for height in (-1e4, 0.0, 1e4):
        weight_VD = torch.full((1000, 1), height)
        logprobs_M, entropy_M = chunked_logprobs(torch.ones(2, 1), weight_VD, torch.tensor([0, 999]), temperature=1.0)
        assert logprobs_M.tolist() == pytest.approx([-np.log(1000)] * 2, rel=1e-6)
        assert entropy_M.tolist() == pytest.approx([np.log(1000)] * 2, rel=1e-6)


def test_a_target_outside_the_vocabulary_is_impossible() -> None:
    logprobs_M, _ = chunked_logprobs(torch.ones(2, 1), torch.ones(3, 1), torch.tensor([3, -1]), temperature=1.0)
    assert logprobs_M.tolist() == [-np.inf, -np.inf]


def test_no_positions_give_no_values_and_zero_gradients() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs(0)
    logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.0)
    assert logprobs_M.shape == entropy_M.shape == (0,)
    (logprobs_M + entropy_M).sum().backward()
    assert hidden_MD.grad.shape == (0, 8)
    assert not weight_VD.grad.any()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_the_weight_is_summed_in_float32(weight_dtype) -> None:
    """1 + 256 * 2^-9 = 1.5, but a sum of bfloat16 numbers would stay at 1."""
    hidden_MD = torch.cat([torch.ones(1, 1), torch.full((256, 1), 2.0**-9)]).to(torch.bfloat16)
    weight_VD = torch.tensor([[0.0], [0.0]], dtype=weight_dtype).requires_grad_()
    targets_M = torch.zeros(257, dtype=torch.int64)
    logprobs_M, _ = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.5, chunk_tokens=1)
    assert logprobs_M.dtype == torch.float32
    logprobs_M.sum().backward()
    assert weight_VD.grad.dtype == weight_dtype
    assert weight_VD.grad.flatten().tolist() == [1.5, -1.5]


def test_autocast_rounds_the_products_and_nothing_else() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs(dtype=torch.bfloat16)
    alone = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.9)
    for one, other in zip(alone, inside, strict=True):
        assert torch.equal(one, other)


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs()
    logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.0)
    total = (logprobs_M + entropy_M).sum()
    first = torch.autograd.grad(total, [hidden_MD, weight_VD], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(total, [hidden_MD, weight_VD]), strict=True):
        torch.testing.assert_close(one, other)


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        chunked_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), temperature=1, chunk_tokens=0)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        chunked_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), temperature=0, chunk_tokens=8)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("micro_batch_tokens", "row_length"), [(4096, None), (4096, 80), (60, 40)])
def test_packed_logprobs_are_those_of_each_sequence_alone_in_hugging_face(
    tiny_model, family, temperature, micro_batch_tokens, row_length
) -> None:
    directory = tiny_model(family)
    policy = TorchPolicy.from_pretrained(directory, TorchPolicyConfig(logprob_chunk_tokens=16))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sequences = make_sequences(1, 20)
    (shard,) = pack_batch(
        sequences, micro_batch_tokens=micro_batch_tokens, row_length=row_length, temperature=temperature
    )
    wanted = {}
    for sequence in sequences:
        ids_T = torch.from_numpy(sequence.token_ids_T)
        with torch.no_grad():
            logits_TV = model(ids_T[None]).logits[0] / temperature
        logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].numpy()
        wanted[sequence.token_ids_T.tobytes()] = np.concatenate([[0.0], logprobs_T]) * sequence.loss_mask_T
    num_checked = 0
    for micro_batch, array_BL in zip(shard.micro_batches, policy.logprobs(shard), strict=True):
        for index in range(int(micro_batch.sequence_ids_BL.max()) + 1):
            where = micro_batch.sequence_ids_BL == index
            alone_T = wanted[micro_batch.token_ids_BL[where].tobytes()]
            np.testing.assert_allclose(array_BL[where], alone_T, rtol=0, atol=1e-5)
            num_checked += 1
    assert num_checked == sum(sequence.num_valid_tokens > 0 for sequence in sequences)


def test_an_all_ones_mask_would_have_been_wrong(tiny_model) -> None:
    """Why no mask is passed: with one, the sequences of a row see each other."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    ids, positions = torch.arange(20)[None], torch.cat([torch.arange(10), torch.arange(10)])[None]
    with torch.no_grad():
        apart = model(ids, position_ids=positions, use_cache=False).logits
        mixed = model(ids, position_ids=positions, attention_mask=torch.ones(1, 20), use_cache=False).logits
        alone = model(ids[:, 10:], use_cache=False).logits
    torch.testing.assert_close(apart[:, 10:], alone, rtol=0, atol=1e-5)
    assert (mixed[:, 10:] - alone).abs().max() > 0.01


def test_bfloat16_stays_near_float32(tiny_model) -> None:
    (shard,) = pack_batch(make_sequences(3, 8))
    policies = [TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(dtype=d)) for d in ("float32", "bfloat16")]
    exact, rounded = (np.concatenate([a.ravel() for a in p.logprobs(shard)]) for p in policies)
    assert 0 < np.abs(exact - rounded).mean() < 0.05
    metrics = policies[1].train_step(shard)
    assert np.isfinite(metrics.loss)
    assert metrics.policy_version == 1
