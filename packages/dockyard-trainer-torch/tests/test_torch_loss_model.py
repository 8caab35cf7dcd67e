"""A step's gradient on every parameter, against float64: Hugging Face's forward of each sequence alone, and the oracle.

Nothing is shared with the trainer but the checkpoint: no packing, no chunks, no shared prefixes, no loss of torch.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_material import LOSSES
from transformers import AutoModelForCausalLM, PreTrainedModel

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.loss import LossOutput
from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig
from dockyard_core.policy import StepMetrics
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig


@dataclasses.dataclass
class Update:
    """What the optimizer was about to apply, and to which weights."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def updates_of(policy: TorchPolicy, shard: BatchShard) -> tuple[StepMetrics, list[Update]]:
    """Take a training step; return its metrics and what each optimizer update saw."""
    updates: list[Update] = []

    def note(*_: object) -> None:
        named = dict(policy.causal_lm.named_parameters())
        gradients = {name: p.grad.detach().double().clone() for name, p in named.items() if p.grad is not None}
        updates.append(Update({name: p.detach().clone() for name, p in named.items()}, gradients))

    with policy.optimizer.register_step_pre_hook(note):
        metrics = policy.train_step(shard)
    return metrics, updates


def double_model(directory: Path, weights: dict[str, torch.Tensor] | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    return model


def scored(model: PreTrainedModel, sequence: TrainSequence, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / T) of tokens 1..T-1 of one sequence, and the entropies."""
    ids_T = torch.from_numpy(sequence.token_ids_T)
    log_probs_TV = (model(ids_T[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs_TV.gather(1, ids_T[1:, None])[:, 0], -(log_probs_TV.exp() * log_probs_TV).sum(-1)


def make_sequences(model: PreTrainedModel, temperature: float, *, seed: int = 0) -> list[TrainSequence]:
    """Groups that share a prompt, two turns each, sampled near the model; what is not trained holds NaN."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(3):
        prompt = rng.integers(0, 64, int(rng.integers(3, 9)))
        for advantage in (*rng.normal(0, 1, 3), 0.0):
            ids = np.concatenate([prompt, rng.integers(0, 64, int(rng.integers(4, 14)))])
            mask = np.arange(len(ids)) >= len(prompt)
            mask[len(prompt) + 2] = False  # a token of the environment between two turns
            bare = TrainSequence(
                token_ids_T=ids, loss_mask_T=mask, sampled_logprobs_T=np.zeros(len(ids), np.float32), advantage=0.0
            )
            with torch.no_grad():
                logprobs = np.concatenate([[0.0], scored(model, bare, temperature)[0].numpy()])
            moved = [np.where(mask, logprobs + rng.normal(0, 0.15, len(ids)), np.nan) for _ in range(2)]
            sequences.append(
                TrainSequence(
                    token_ids_T=ids,
                    loss_mask_T=mask,
                    sampled_logprobs_T=moved[0].astype(np.float32),
                    proximal_logprobs_T=moved[1].astype(np.float32),
                    advantage=float(np.float32(advantage)),
                )
            )
    return sequences


def oracle_step(
    config: LossConfig,
    sequences: list[TrainSequence],
    temperature: float,
    model: PreTrainedModel,
    reference: PreTrainedModel,
    proximal: PreTrainedModel | None = None,
) -> tuple[LossOutput, dict[str, torch.Tensor]]:
    """Loss and gradient by name; proximal logprobs are those of ``proximal``, or else the sequences' own."""
    shape = (len(sequences), max(sequence.num_tokens for sequence in sequences))
    names = ("logprobs", "sampled_logprobs", "proximal_logprobs", "ref_logprobs", "entropy")
    arrays = {name: np.full(shape, np.nan) for name in names}
    mask, graph = np.zeros(shape, bool), []
    for row, sequence in enumerate(sequences):
        span = np.s_[row, 1 : sequence.num_tokens]
        logprobs_T, entropy_T = scored(model, sequence, temperature)
        graph.append((span, logprobs_T, entropy_T))
        arrays["logprobs"][span], arrays["entropy"][span] = logprobs_T.detach(), entropy_T.detach()
        with torch.no_grad():
            arrays["ref_logprobs"][span] = scored(reference, sequence, temperature)[0]
            if proximal is not None:
                arrays["proximal_logprobs"][span] = scored(proximal, sequence, temperature)[0]
            else:
                arrays["proximal_logprobs"][span] = sequence.proximal_logprobs_T[1:]
        arrays["sampled_logprobs"][span] = sequence.sampled_logprobs_T[1:]
        mask[row, : sequence.num_tokens] = sequence.loss_mask_T
    given = arrays if config.proximal == "given" else arrays | {"proximal_logprobs": None}
    out = oracle(config, **given, advantages=np.array([s.advantage for s in sequences]), loss_mask=mask)
    model.zero_grad()
    for span, logprobs_T, entropy_T in graph:
        pulls = [torch.from_numpy(out.grad[span]), torch.from_numpy(out.entropy_grad[span])]
        torch.autograd.backward([logprobs_T, entropy_T], pulls)
    return out, {name: p.grad for name, p in model.named_parameters()}


def assert_gradients_are(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == wanted.keys()
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    off = {
        name: float((gradients[name] - gradient).norm() / max(float(gradient.norm()), 1e-3 * whole))
        for name, gradient in wanted.items()
    }
    assert max(off.values()) <= 1e-5, {name: value for name, value in off.items() if value > 1e-5}


def moved_policy(directory: Path, options: dict, **kwargs: object) -> TorchPolicy:
    """A policy away from its reference, so that the KL has a gradient."""
    config = TorchPolicyConfig(
        max_grad_norm=1e9, logprob_chunk_tokens=16, load_reference=True, loss=LossConfig(**options), **kwargs
    )
    policy = TorchPolicy.from_pretrained(directory, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("family", "is_tied"), [("qwen2", True), ("llama", False)])
def test_every_parameter_gets_the_gradient_of_hugging_face_and_the_oracle(tiny_model, family, is_tied, name) -> None:
    directory, temperature = tiny_model(family, is_tied=is_tied), 0.7
    policy = moved_policy(directory, LOSSES[name])
    model = double_model(directory, {n: p.detach().clone() for n, p in policy.causal_lm.named_parameters()})
    sequences = make_sequences(model, temperature)
    (shard,) = pack_batch(sequences, micro_batch_tokens=64, temperature=temperature)
    assert len(shard.micro_batches) > 2
    metrics, (update,) = updates_of(policy, shard)
    wanted, gradients = oracle_step(policy.config.loss, sequences, temperature, model, double_model(directory))
    assert_gradients_are(update.gradients, gradients)
    assert metrics.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert (0 < metrics.clip_fraction < 1) == (policy.config.loss.proximal != "current")
    named = {field.name: getattr(metrics, field.name) for field in dataclasses.fields(metrics)} | dict(metrics.extra)
    for key, value in wanted.metrics.items():
        assert named[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_a_second_update_takes_its_ratio_to_the_weights_before_the_first(tiny_model) -> None:
    directory, temperature = tiny_model("qwen2"), 0.7
    options = {"proximal": "given", "clip_high": 0.28, "kl_coef": 0.1}
    policy = moved_policy(directory, options, updates_per_batch=2, learning_rate=3e-3)
    model = double_model(directory, {n: p.detach().clone() for n, p in policy.causal_lm.named_parameters()})
    sequences = [dataclasses.replace(s, proximal_logprobs_T=None) for s in make_sequences(model, temperature)]
    (shard,) = pack_batch(sequences, micro_batch_tokens=64, temperature=temperature)
    metrics, updates = updates_of(policy, shard)
    assert len(updates) == 2
    assert metrics.policy_version == policy.version == 1
    before, reference = double_model(directory, updates[0].weights), double_model(directory)
    clip_fractions = []
    for update in updates:
        now = double_model(directory, update.weights)
        wanted, gradients = oracle_step(policy.config.loss, sequences, temperature, now, reference, before)
        assert_gradients_are(update.gradients, gradients)
        clip_fractions.append(wanted.metrics["clip_fraction"])
    assert clip_fractions[0] == 0 < clip_fractions[1] < 1
