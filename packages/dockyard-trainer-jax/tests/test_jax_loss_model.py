"""A step's gradient on every parameter, against torch's, and against float64: Hugging Face's forward of each sequence
alone, and the oracle.

Nothing is shared with the float64 side but the checkpoint: no packing, no chunks, no shared prefixes, no loss of JAX.
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
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

Arrays = dict[str, np.ndarray]
TEMPERATURE = 0.7
# With betas of 0 the first moment is the gradient; learning to be away from the reference gives the KL a gradient.
OPTIONS = {
    "learning_rate": 1e-2,
    "eps": 1e-4,
    "betas": (0.0, 0.0),
    "max_grad_norm": 1e9,
    "logprob_chunk_tokens": 16,
    "load_reference": True,
}
TIED, UNTIED = ("qwen2", True), ("llama", False)
CASES = [
    (model, name)
    for model, names in ((TIED, LOSSES), (UNTIED, ("default", "clip to the sampler", "kl and entropy")))
    for name in names
]


def double_model(directory: Path, weights: Arrays | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    if weights is not None:
        copy_into(model, weights)
    return model


def copy_into(model: torch.nn.Module, weights: Arrays) -> None:
    """Set every parameter; a tied one is held once."""
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys()
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(torch.from_numpy(weights[name]))


def streamed(policy: JaxPolicy) -> Arrays:
    held: Arrays = {}
    policy.stream_weights(lambda chunk: held.update({chunk.name: np.array(np.from_dlpack(chunk.array))}))
    return held


def scored(model: PreTrainedModel, sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / T) of tokens 1..T-1 of one sequence, and the entropies."""
    ids_T = torch.from_numpy(sequence.token_ids_T)
    log_probs_TV = (model(ids_T[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return log_probs_TV.gather(1, ids_T[1:, None])[:, 0], -(log_probs_TV.exp() * log_probs_TV).sum(-1)


def make_sequences(model: PreTrainedModel | None = None) -> list[TrainSequence]:
    """Groups that share a prompt, two turns each, sampled near the model; what is not trained holds NaN."""
    rng = np.random.default_rng(0)
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
            logprobs = np.full(len(ids), -4.0)
            if model is not None:
                with torch.no_grad():
                    logprobs[1:] = scored(model, bare)[0].numpy()
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


def packed(sequences: list[TrainSequence]) -> BatchShard:
    (shard,) = pack_batch(sequences, micro_batch_tokens=64, temperature=TEMPERATURE)
    assert len(shard.micro_batches) > 2
    return shard


def oracle_step(
    config: LossConfig,
    sequences: list[TrainSequence],
    model: PreTrainedModel,
    reference: PreTrainedModel,
    proximal: PreTrainedModel | None = None,
) -> tuple[LossOutput, Arrays]:
    """Loss and gradient by name; proximal logprobs are those of ``proximal``, or else the sequences' own."""
    shape = (len(sequences), max(sequence.num_tokens for sequence in sequences))
    names = ("logprobs", "sampled_logprobs", "proximal_logprobs", "ref_logprobs", "entropy")
    arrays = {name: np.full(shape, np.nan) for name in names}
    mask, graph = np.zeros(shape, bool), []
    for row, sequence in enumerate(sequences):
        span = np.s_[row, 1 : sequence.num_tokens]
        logprobs_T, entropy_T = scored(model, sequence)
        graph.append((span, logprobs_T, entropy_T))
        arrays["logprobs"][span], arrays["entropy"][span] = logprobs_T.detach(), entropy_T.detach()
        with torch.no_grad():
            arrays["ref_logprobs"][span] = scored(reference, sequence)[0]
            if proximal is not None:
                arrays["proximal_logprobs"][span] = scored(proximal, sequence)[0]
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
    return out, {name: p.grad.numpy() for name, p in model.named_parameters()}


def torch_step(
    directory: Path, options: dict, before: Arrays, weights: Arrays, shard: BatchShard
) -> tuple[StepMetrics, Arrays]:
    """Metrics and gradient of the PyTorch trainer, whose reference has the weights ``before``."""
    policy = TorchPolicy.from_pretrained(directory, TorchPolicyConfig(**OPTIONS, loss=LossConfig(**options)))
    assert all(np.array_equal(p.detach(), before[name]) for name, p in policy.causal_lm.named_parameters())
    copy_into(policy.causal_lm, weights)
    gradients: Arrays = {}

    def note(*_: object) -> None:
        named = policy.causal_lm.named_parameters()
        gradients.update({name: p.grad.detach().clone().numpy() for name, p in named if p.grad is not None})

    with policy.optimizer.register_step_pre_hook(note):
        return policy.train_step(shard), gradients


def assert_gradients_are(gradients: Arrays, wanted: Arrays) -> None:
    assert gradients.keys() == wanted.keys()
    whole = float(np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in wanted.values())))
    off = {
        name: np.linalg.norm(gradients[name] - gradient) / max(np.linalg.norm(gradient), 1e-3 * whole)
        for name, gradient in wanted.items()
    }
    assert max(off.values()) <= 1e-5, {name: value for name, value in off.items() if value > 1e-5}


def named(metrics: StepMetrics) -> dict[str, float]:
    return {field.name: getattr(metrics, field.name) for field in dataclasses.fields(metrics)} | dict(metrics.extra)


# In the default tier the loss is the oracle's, the model Hugging Face's, and the step torch's, each by itself.
@pytest.mark.ci
@pytest.mark.parametrize(("model_kind", "name"), CASES, ids=str)
def test_every_parameter_gets_the_gradient_of_torch_and_of_the_oracle(
    tiny_model, gradients_of, model_kind, name
) -> None:
    directory = tiny_model(model_kind[0], is_tied=model_kind[1])
    config = JaxPolicyConfig(**OPTIONS, loss=LossConfig(**LOSSES[name]))
    policy = JaxPolicy.from_pretrained(directory, config)
    before = streamed(policy)
    policy.train_step(packed(make_sequences()))
    weights = streamed(policy)
    model = double_model(directory, weights)
    sequences = make_sequences(model)
    shard = packed(sequences)
    metrics, gradients = policy.train_step(shard), gradients_of(policy)
    wanted, exact = oracle_step(config.loss, sequences, model, double_model(directory, before))
    assert_gradients_are(gradients, exact)
    torch_metrics, torch_gradients = torch_step(directory, LOSSES[name], before, weights, shard)
    assert_gradients_are(gradients, torch_gradients)
    assert metrics.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert (0 < metrics.clip_fraction < 1) == (config.loss.proximal != "current")
    ours, theirs = named(metrics), named(torch_metrics)
    for key, value in wanted.metrics.items():
        assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert ours.keys() - theirs.keys() <= {"num_compiled_shapes", "num_compiled", "compile_s"}
    for key in theirs.keys() - {"extra", "policy_version"}:  # torch has not taken the first step
        assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-6), key


@pytest.mark.ci
def test_a_second_update_takes_its_ratio_to_the_weights_before_the_first(tiny_model, gradients_of) -> None:
    directory = tiny_model("qwen2")
    loss = LossConfig(proximal="given", clip_high=0.28, kl_coef=0.1)
    sequences: list[TrainSequence] = []
    seen: list[tuple[Arrays, Arrays]] = []  # weights that an update starts from, and its gradient
    start: Arrays = {}
    for num_updates in (1, 2):  # the first is where the second policy's second update starts from
        config = JaxPolicyConfig(**OPTIONS | {"learning_rate": 3e-3}, updates_per_batch=num_updates, loss=loss)
        policy = JaxPolicy.from_pretrained(directory, config)
        initial = streamed(policy)
        sequences = sequences or [
            dataclasses.replace(s, proximal_logprobs_T=None) for s in make_sequences(double_model(directory, initial))
        ]
        metrics = policy.train_step(packed(sequences))
        assert (metrics.policy_version, policy.version, policy.num_updates) == (1, 1, num_updates)
        seen.append((start or initial, gradients_of(policy)))
        start = streamed(policy)
    before, reference, clip_fractions = double_model(directory), double_model(directory), []
    for weights, gradients in seen:
        wanted, exact = oracle_step(loss, sequences, double_model(directory, weights), reference, before)
        assert_gradients_are(gradients, exact)
        clip_fractions.append(wanted.metrics["clip_fraction"])
    assert clip_fractions[0] == 0 < clip_fractions[1] < 1
