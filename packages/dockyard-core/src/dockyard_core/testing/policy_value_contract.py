# ruff: noqa: D102 - the names of the laws are their documentation
"""What a policy's numbers must be, and not only that they agree with each other; part of `policy_contract`.

Nothing here knows a framework or a model: a distribution sums to 1, a causal model cannot see ahead, a
temperature divides logits, and the loss is that of the float64 oracle.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dockyard_core.batch import MicroBatch, TrainSequence, pack_batch
from dockyard_core.loss import policy_loss
from dockyard_core.loss_config import LossConfig
from dockyard_core.policy import Policy, WeightChunk
from dockyard_core.testing.policy_material import PolicyMaterial


class PolicyValueContract(PolicyMaterial):
    """Laws of what ``logprobs``, ``train_step`` and ``stream_weights`` hand out, on one rank."""

    loss_rtol: float = 1e-4
    """How far the loss may be from the oracle's on the policy's own logprobs."""

    def next_token_logprobs(self, policy: Policy, temperature: float) -> np.ndarray:
        """Of every token of the vocabulary after one prompt, [V]."""
        prompt = np.arange(5) % self.vocab_size
        mask = np.arange(6) == 5
        sequences = [
            TrainSequence(
                token_ids_T=np.append(prompt, token),
                loss_mask_T=mask,
                sampled_logprobs_T=np.zeros(6, np.float32),
                advantage=1.0,
            )
            for token in range(self.vocab_size)
        ]
        (shard,) = pack_batch(sequences, temperature=temperature)
        found = np.full(self.vocab_size, np.nan)
        for micro_batch, logprobs_BL in zip(shard.micro_batches, policy.logprobs(shard), strict=True):
            found[micro_batch.token_ids_BL[micro_batch.loss_mask_BL]] = logprobs_BL[micro_batch.loss_mask_BL]
        return found

    def test_logprobs_are_a_distribution_whose_logits_the_temperature_divides(self) -> None:
        policy = self.make_policy()
        plain = self.next_token_logprobs(policy, 1.0)
        assert plain.max() - plain.min() > 10 * self.logprob_atol, "a uniform model would hide every mistake"
        for temperature in (1.0, 0.5, 2.0):
            found = self.next_token_logprobs(policy, temperature)
            assert abs(np.exp(found).sum() - 1) <= 2 * self.logprob_atol
            wanted = plain / temperature - np.log(np.exp(plain / temperature).sum())
            np.testing.assert_allclose(found, wanted, rtol=0, atol=4 * self.logprob_atol)

    def test_a_token_sees_its_past_and_nothing_else(self) -> None:
        policy = self.make_policy()
        mask = np.arange(10) > 0
        kept = TrainSequence(
            token_ids_T=np.arange(10) % self.vocab_size,
            loss_mask_T=mask,
            sampled_logprobs_T=np.zeros(10, np.float32),
            advantage=1.0,
        )
        changed_ids = kept.token_ids_T.copy()
        changed_ids[4] = (changed_ids[4] + 1) % self.vocab_size
        changed = dataclasses.replace(kept, token_ids_T=changed_ids)
        before, after = (policy.logprobs(pack_batch([each])[0])[0][0] for each in (kept, changed))
        np.testing.assert_allclose(before[:4], after[:4], rtol=0, atol=self.logprob_atol)
        assert (np.abs(before - after)[4:] > self.logprob_atol).any()

    def test_the_loss_is_the_oracles_on_the_policys_own_logprobs(self) -> None:
        policy, shard = self.make_policy(), self.shard(micro_batch_tokens=24)
        assert len(shard.micro_batches) > 1
        found = policy.logprobs(shard)
        wanted, differences = 0.0, []
        for mb, logprobs_BL in zip(shard.micro_batches, found, strict=True):
            wanted += policy_loss(
                LossConfig(),
                logprobs=logprobs_BL,
                sampled_logprobs=mb.sampled_logprobs_BL,
                advantages=mb.advantages_BL,
                loss_mask=mb.loss_mask_BL,
                num_valid_tokens=shard.num_valid_tokens,
            ).loss
            differences.append(np.abs(logprobs_BL - mb.sampled_logprobs_BL)[mb.loss_mask_BL])
        metrics, difference = policy.train_step(shard), np.concatenate(differences)
        assert math.isclose(metrics.loss, wanted, rel_tol=self.loss_rtol, abs_tol=self.logprob_atol)
        assert metrics.num_valid_tokens == shard.num_valid_tokens == len(difference)
        assert math.isclose(metrics.offpolicy_abs_diff_mean, difference.mean(), abs_tol=2 * self.logprob_atol)
        assert math.isclose(metrics.offpolicy_abs_diff_max, difference.max(), abs_tol=2 * self.logprob_atol)
        assert (metrics.clip_fraction, metrics.kl_ref) == (0.0, 0.0), "nothing is clipped at the first update"

    def test_the_entropy_is_that_of_the_next_token_at_the_temperature(self) -> None:
        policy = self.make_policy()
        mask = np.arange(6) == 5
        sequence = TrainSequence(
            token_ids_T=np.append(np.arange(5) % self.vocab_size, 0),
            loss_mask_T=mask,
            sampled_logprobs_T=np.zeros(6, np.float32),
            advantage=1.0,
        )
        logprobs = self.next_token_logprobs(policy, 0.5)
        (shard,) = pack_batch([sequence], temperature=0.5)
        wanted = -float((np.exp(logprobs) * logprobs).sum())
        assert math.isclose(policy.train_step(shard).entropy, wanted, abs_tol=10 * self.logprob_atol)

    def test_what_padding_holds_is_never_read(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        clean = self.shard(row_length=40)
        assert any((mb.sequence_ids_BL < 0).any() for mb in clean.micro_batches)

        def dirty(mb: MicroBatch) -> MicroBatch:
            is_padding = mb.sequence_ids_BL < 0
            return dataclasses.replace(
                mb,
                token_ids_BL=np.where(is_padding, self.vocab_size - 1, mb.token_ids_BL),
                sampled_logprobs_BL=np.where(is_padding, np.float32(np.nan), mb.sampled_logprobs_BL),
                advantages_BL=np.where(is_padding, np.float32(np.nan), mb.advantages_BL),
            )

        spoiled = dataclasses.replace(clean, micro_batches=tuple(map(dirty, clean.micro_batches)))
        first, second = one.train_step(clean), other.train_step(spoiled)
        assert math.isclose(first.loss, second.loss, rel_tol=1e-6, abs_tol=1e-9)
        self.assert_equal_weights(one, other, atol=self.weight_atol)

    def test_every_element_is_streamed_once_and_is_that_of_the_export(self, tmp_path: Path) -> None:
        policy = self.make_policy()
        policy.train_step(self.shard())
        times: dict[str, np.ndarray] = {}

        def sink(chunk: WeightChunk) -> None:
            counts = times.setdefault(chunk.name, np.zeros(chunk.global_shape, np.int64))
            shape = np.from_dlpack(chunk.array).shape
            counts[tuple(slice(start, start + size) for start, size in zip(chunk.offset, shape, strict=True))] += 1

        policy.stream_weights(sink)
        for name, counts in times.items():
            assert (counts == 1).all(), name
        policy.snapshot().export(tmp_path / "export")
        exported, streamed = read_safetensors(tmp_path / "export"), PolicyMaterial.weights(self, policy)
        assert streamed.keys() <= exported.keys(), "an export may name a tied tensor twice"
        for name, array in streamed.items():
            np.testing.assert_array_equal(array, exported[name], err_msg=name)


def read_safetensors(directory: Path) -> Mapping[str, np.ndarray]:
    """The tensors of a directory's safetensors files, float32 or bfloat16, as float32."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        held = path.read_bytes()
        size = int.from_bytes(held[:8], "little")
        for name, about in json.loads(held[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in about["data_offsets"])
                if about["dtype"] == "BF16":  # the upper half of a float32
                    flat = (np.frombuffer(held[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
                else:
                    assert about["dtype"] == "F32", f"{name}: {about['dtype']}"
                    flat = np.frombuffer(held[begin:end], "<f4")
                found[name] = flat.reshape(about["shape"])
    return found
