# ruff: noqa: D102 - the names of the laws are their documentation
"""What every trainer must do, as a test class to subclass.

    class TestMyPolicy(PolicyContract):
        vocab_size = 64

        def make_policy(self) -> Policy: ...
        def manifest(self, policy: Policy) -> Sequence[TensorSpec]: ...

Needs numpy, and pytest to collect it; imports neither a framework nor pytest.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dockyard_core.batch import pack_batch
from dockyard_core.policy import WeightChunk
from dockyard_core.testing.policy_snapshot_contract import PolicySnapshotContract
from dockyard_core.testing.policy_value_contract import PolicyValueContract


class SinkFailed(Exception):
    """Raised by the contract's own sink."""


class PolicyContract(PolicySnapshotContract, PolicyValueContract):
    """Laws of the ``Policy`` seam on one rank."""

    def test_a_step_advances_the_version_by_one_and_moves_the_weights(self) -> None:
        policy, untouched = self.make_policy(), self.make_policy()
        assert policy.version == 0
        metrics = policy.train_step(self.shard())
        assert (policy.version, metrics.policy_version, metrics.is_skipped) == (1, 1, False)
        assert math.isfinite(metrics.loss)
        assert metrics.grad_norm > 0
        before, after = self.weights(untouched), self.weights(policy)
        assert any((before[name] != after[name]).any() for name in before)

    def test_steps_make_rewarded_tokens_likelier_and_punished_ones_less_likely(self) -> None:
        policy = self.make_policy()
        sequences = self.sequences(count=2)
        signed = [dataclasses.replace(s, advantage=a) for s, a in zip(sequences, (1.0, -1.0), strict=True)]
        (shard,) = pack_batch(signed)
        (mb,) = shard.micro_batches
        (before,) = policy.logprobs(shard)
        for _ in range(3):
            policy.train_step(shard)
        (after,) = policy.logprobs(shard)
        change = (after - before) * mb.advantages_BL
        assert change[mb.loss_mask_BL].mean() > 0

    def test_equal_policies_take_equal_steps(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        for seed in range(2):
            assert one.train_step(self.shard(seed)) == other.train_step(self.shard(seed))
        self.assert_equal_weights(one, other)

    def test_logprobs_are_of_the_trained_tokens_only(self) -> None:
        policy, shard = self.make_policy(), self.shard()
        for array, micro_batch in zip(policy.logprobs(shard), shard.micro_batches, strict=True):
            assert array.shape == micro_batch.shape
            assert array.dtype == np.float32
            assert (array[~micro_batch.loss_mask_BL] == 0).all()
            assert (array[micro_batch.loss_mask_BL] < 0).all()

    def test_packing_changes_no_logprob(self) -> None:
        policy = self.make_policy()
        alone: dict[bytes, np.ndarray] = {}
        for sequence in self.sequences():
            (shard,) = pack_batch([sequence])
            alone[sequence.token_ids_T.tobytes() + sequence.loss_mask_T.tobytes()] = policy.logprobs(shard)[0][0]
        (shard,) = pack_batch(self.sequences(), row_length=40)
        (mb,) = shard.micro_batches
        assert mb.shape[0] > 1, "the law is about several rows of several sequences"
        (packed_BL,) = policy.logprobs(shard)
        for index in range(8):
            where = mb.sequence_ids_BL == index
            wanted = alone[mb.token_ids_BL[where].tobytes() + mb.loss_mask_BL[where].tobytes()]
            np.testing.assert_allclose(packed_BL[where], wanted, rtol=0, atol=self.logprob_atol)

    def test_splitting_a_step_into_micro_batches_changes_nothing(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        whole, parts = self.shard(row_length=30), self.shard(micro_batch_tokens=1)
        assert len(whole.micro_batches) == 1
        assert len(parts.micro_batches) > 3
        first, second = one.train_step(whole), other.train_step(parts)
        for name in ("loss", "grad_norm", "entropy", "offpolicy_abs_diff_mean", "offpolicy_abs_diff_max"):
            assert math.isclose(getattr(first, name), getattr(second, name), rel_tol=1e-4, abs_tol=1e-6), name
        self.assert_equal_weights(one, other, atol=self.weight_atol)

    def test_what_masked_slots_hold_is_never_read(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        clean = self.shard()
        for poison in (np.nan, np.inf, -np.inf):
            dirty = dataclasses.replace(
                clean,
                micro_batches=tuple(
                    dataclasses.replace(
                        mb,
                        sampled_logprobs_BL=np.where(mb.loss_mask_BL, mb.sampled_logprobs_BL, poison),
                        advantages_BL=np.where(mb.loss_mask_BL, mb.advantages_BL, poison),
                    )
                    for mb in clean.micro_batches
                ),
            )
            assert one.train_step(clean) == other.train_step(dirty)
        self.assert_equal_weights(one, other)

    def test_a_step_without_trained_tokens_has_zero_loss_and_counts(self) -> None:
        policy = self.make_policy()
        policy.train_step(self.shard())
        (empty,) = pack_batch([])
        metrics = policy.train_step(empty)
        assert (metrics.loss, metrics.grad_norm, metrics.is_skipped) == (0.0, 0.0, False)
        assert policy.version == 2
        assert all(np.isfinite(array).all() for array in self.weights(policy).values())

    def test_leaving_out_rows_of_zero_advantage_changes_nothing(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        for seed in range(3):
            sequences = self.sequences(seed)
            if seed == 1:  # nothing but zeros: the moments must still decay
                sequences = [dataclasses.replace(sequence, advantage=0.0) for sequence in sequences]
            one.train_step(pack_batch(sequences)[0])
            other.train_step(pack_batch(sequences, skip_zero_advantage=True)[0])
        assert one.version == other.version == 3
        self.assert_equal_weights(one, other, atol=self.weight_atol)

    def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(self) -> None:
        one, other = self.make_policy(), self.make_policy()
        one.train_step(self.shard())
        other.train_step(self.shard())
        broken = dataclasses.replace(self.sequences()[0], advantage=math.inf)
        metrics = one.train_step(pack_batch([broken])[0])
        assert (metrics.is_skipped, metrics.policy_version, one.version) == (True, 1, 1)
        self.assert_equal_weights(one, other)
        one.train_step(self.shard(1))
        other.train_step(self.shard(1))
        self.assert_equal_weights(one, other)

    def test_a_shard_that_cannot_be_read_is_refused_and_leaves_no_trace(self) -> None:
        policy, twin = self.make_policy(), self.make_policy()
        good = self.shard()
        first = good.micro_batches[0]
        spoiled = {
            "token ids must lie in": {"token_ids_BL": first.token_ids_BL + self.vocab_size},
            "must have the shape": {"advantages_BL": first.advantages_BL[:, 1:]},
            "must hold bool": {"loss_mask_BL": first.loss_mask_BL.astype(np.float32)},
            "cannot be trained": {"loss_mask_BL": np.ones_like(first.loss_mask_BL)},
        }
        for rule, change in spoiled.items():
            bad = dataclasses.replace(good, micro_batches=(dataclasses.replace(first, **change),))
            for call in (policy.train_step, policy.logprobs):
                said = ""
                try:
                    call(bad)
                except ValueError as error:
                    said = str(error)
                assert rule in said, (rule, said)
        assert policy.train_step(good) == twin.train_step(good)
        self.assert_equal_weights(policy, twin)

    def test_the_stream_is_the_manifest_in_its_order_each_tensor_once(self) -> None:
        policy = self.make_policy()
        streamed: list[tuple[str, tuple[int, ...]]] = []
        num_elements: dict[str, int] = {}

        def sink(chunk: WeightChunk) -> None:
            if chunk.name not in num_elements:
                streamed.append((chunk.name, tuple(chunk.global_shape)))
            num_elements[chunk.name] = num_elements.get(chunk.name, 0) + np.from_dlpack(chunk.array).size

        policy.stream_weights(sink)
        manifest = self.manifest(policy)
        assert streamed == [(spec.name, spec.shape) for spec in manifest]
        assert num_elements == {spec.name: math.prod(spec.shape) for spec in manifest}
        assert len({spec.name for spec in manifest}) == len(manifest)

    def test_a_sink_that_raises_leaves_the_policy_usable(self) -> None:
        policy, twin = self.make_policy(), self.make_policy()
        seen: list[str] = []

        def sink(chunk: WeightChunk) -> None:
            seen.append(chunk.name)
            if len(seen) == 2:
                raise SinkFailed(chunk.name)

        raised: SinkFailed | None = None
        try:
            policy.stream_weights(sink)
        except SinkFailed as error:
            raised = error
        assert raised is not None
        assert len(seen) == 2, "nothing is streamed after the sink raised"
        assert policy.train_step(self.shard()) == twin.train_step(self.shard())
        self.assert_equal_weights(policy, twin)
