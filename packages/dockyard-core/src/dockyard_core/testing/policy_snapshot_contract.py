# ruff: noqa: D102 - the names of the laws are their documentation
"""What a policy's saves and snapshots must do; part of `policy_contract`."""

from __future__ import annotations

import threading
from pathlib import Path

from dockyard_core.testing.policy_material import PolicyMaterial


class PolicySnapshotContract(PolicyMaterial):
    """Laws of ``save``, ``restore`` and ``snapshot`` on one rank."""

    def test_after_a_restore_the_next_step_is_the_one_after_the_save(self, tmp_path: Path) -> None:
        policy = self.make_policy()
        policy.train_step(self.shard(0))
        policy.train_step(self.shard(3))
        policy.save(tmp_path / "checkpoint")
        wanted = policy.train_step(self.shard(1))
        restored = self.make_policy()
        restored.train_step(self.shard(2))  # other moments, another step count: nothing of them stays
        restored.restore(tmp_path / "checkpoint")
        assert restored.version == 2
        assert restored.train_step(self.shard(1)) == wanted
        self.assert_equal_weights(policy, restored)

    def test_a_snapshot_written_after_more_steps_restores_the_moment_it_was_taken(self, tmp_path: Path) -> None:
        policy, twin = self.make_policy(), self.make_policy()
        for seed in (0, 3):
            policy.train_step(self.shard(seed))
            twin.train_step(self.shard(seed))
        snapshot = policy.snapshot()
        for seed in (1, 2):
            policy.train_step(self.shard(seed))
        assert policy.version == 4
        snapshot.write(tmp_path / "late")
        restored = self.make_policy()
        restored.restore(tmp_path / "late")
        assert restored.version == 2
        self.assert_equal_weights(restored, twin)
        for seed in (1, 2):  # moments and schedule too: the same steps follow, bit for bit
            assert restored.train_step(self.shard(seed)) == twin.train_step(self.shard(seed))
        self.assert_equal_weights(restored, twin)
        self.assert_equal_weights(restored, policy)

    def test_a_later_write_replaces_an_earlier_one(self, tmp_path: Path) -> None:
        policy = self.make_policy()
        for seed in (0, 1):
            policy.train_step(self.shard(seed))
            policy.snapshot().write(tmp_path / "checkpoint")
            policy.snapshot().export(tmp_path / "export")
        restored = self.make_policy()
        restored.restore(tmp_path / "checkpoint")
        assert restored.version == 2
        self.assert_equal_weights(policy, restored)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "export"], "nothing is left beside"

    def test_a_snapshot_is_written_by_a_thread_while_the_policy_steps(self, tmp_path: Path) -> None:
        policy, alone = self.make_policy(), self.make_policy()
        policy.train_step(self.shard(0))
        alone.train_step(self.shard(0))
        snapshot, is_stepping = policy.snapshot(), threading.Event()
        written: list[int] = []

        def write() -> None:
            is_stepping.wait(60)
            for index in range(8):
                snapshot.write(tmp_path / f"copy-{index}")
                snapshot.export(tmp_path / f"export-{index}")
                written.append(index)

        writer = threading.Thread(target=write)
        writer.start()
        seeds: list[int] = []
        while writer.is_alive() or not seeds:
            seeds.append(1 + len(seeds) % 3)
            is_stepping.set()
            policy.train_step(self.shard(seeds[-1]))
        writer.join()
        assert len(written) == 8
        for index in (0, 7):
            restored = self.make_policy()
            restored.restore(tmp_path / f"copy-{index}")
            assert restored.version == 1
            self.assert_equal_weights(restored, alone)
        for seed in seeds:  # and the writer changed nothing for the policy
            alone.train_step(self.shard(seed))
        self.assert_equal_weights(policy, alone)
