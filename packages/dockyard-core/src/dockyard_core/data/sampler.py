"""The order in which tasks are visited; restartable anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


class TaskSampler:
    """Uniform without replacement: every epoch is a permutation of all tasks.

    The order depends on (seed, epoch) alone, by hashing, so that it is the same on every machine and
    Python version, and a restored sampler goes on exactly where it was.

    Args:
        num_tasks: >= 1.
        seed: of the order.
    """

    def __init__(self, num_tasks: int, seed: int) -> None:
        if num_tasks < 1:
            raise ValueError(f"num_tasks must be >= 1, got {num_tasks}; the dataset has no tasks")
        self._num_tasks = num_tasks
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def next(self) -> tuple[int, int]:
        """(index of the task, repetition): the repetition counts earlier visits of the same task."""
        if self._position == self._num_tasks:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        index = self._order[self._position]
        self._position += 1
        return index, self._epoch

    def state(self) -> dict[str, int]:
        """What `from_state` needs; plain integers."""
        return {
            "num_tasks": self._num_tasks,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, int]) -> TaskSampler:
        """A sampler whose next visits are those that followed `state`.

        Raises:
            ValueError: a key is missing or out of range.
        """
        missing = sorted({"num_tasks", "seed", "epoch", "position"} - state.keys())
        if missing:
            raise ValueError(f"a sampler's state needs {', '.join(missing)}, got {sorted(state)}; save it again")
        sampler = cls(state["num_tasks"], state["seed"])
        if state["epoch"] < 0 or not 0 <= state["position"] <= state["num_tasks"]:
            raise ValueError(f"a sampler's state must lie within its epoch, got {dict(state)}; save it again")
        sampler._epoch, sampler._position = state["epoch"], state["position"]
        sampler._order = sampler._permutation()
        return sampler

    def _permutation(self) -> list[int]:
        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self._seed}/{self._epoch}/{index}".encode()).digest()

        return sorted(range(self._num_tasks), key=key)
