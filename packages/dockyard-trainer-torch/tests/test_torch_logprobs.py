import numpy as np
import pytest
import torch
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
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
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


def test_the_gradient_is_the_finite_difference_in_float64() -> None:
    # gradcheck needs float64 all the way, and the library computes logits in float32: check by hand.
    hidden_MD, weight_VD = torch.randn(3, 4).requires_grad_(), torch.randn(6, 4)
    targets_M = torch.tensor([0, 5, 2])
    logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.3, chunk_tokens=2)
    (grad_MD,) = torch.autograd.grad((logprobs_M + 0.5 * entropy_M).sum(), hidden_MD)
    for index in np.ndindex(3, 4):
        step = torch.zeros(3, 4, dtype=torch.float64)
        step[index] = 1e-6
        high, low = (
            sum(plain(hidden_MD.detach().double() + sign * step, weight_VD.double(), targets_M, 1.3)[0])
            + 0.5 * sum(plain(hidden_MD.detach().double() + sign * step, weight_VD.double(), targets_M, 1.3)[1])
            for sign in (1, -1)
        )
        assert float(grad_MD[index]) == pytest.approx(float((high - low) / 2e-6), abs=1e-4)


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
