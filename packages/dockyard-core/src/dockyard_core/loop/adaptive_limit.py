"""How much may be asked of a server at once: more while it keeps up, less when it says that it does not."""

from __future__ import annotations

MIN_LIMIT = 1.0


class AdaptiveLimit:
    """Additive increase, multiplicative decrease, without IO and without a clock.

    A whole round of answers without a refusal adds 1 to the limit; a refusal multiplies it by
    ``decrease``. Requests that were already under way at the last decrease say nothing new: their
    refusals do not count again (as in TCP, one loss event per window: Jacobson, "Congestion avoidance
    and control", 1988).

    Args:
        initial: requests at once, to begin with.
        maximum: never more than this.
        decrease: factor in (0, 1).
    """

    def __init__(self, initial: int, *, maximum: int, decrease: float = 0.7) -> None:
        if not 1 <= initial <= maximum:
            raise ValueError(f"initial must be in [1, maximum = {maximum}], got {initial}")
        if not 0 < decrease < 1:
            raise ValueError(f"decrease must be in (0, 1), got {decrease}")
        self._limit = float(initial)
        self._maximum = maximum
        self._decrease = decrease
        self._num_sent = 0
        self._recovery_until = 0
        self.num_under_way = 0
        self.num_refused = 0

    @property
    def limit(self) -> int:
        """Requests that may be under way at once."""
        return int(self._limit)

    @property
    def may_send(self) -> bool:
        """Whether one more request may be sent."""
        return self.num_under_way < self.limit

    def send(self) -> int:
        """Count a request as under way; returns its ticket. Raises ValueError above the limit."""
        if not self.may_send:
            raise ValueError(f"{self.num_under_way} requests are under way, the limit is {self.limit}")
        self.num_under_way += 1
        self._num_sent += 1
        return self._num_sent

    def answered(self) -> None:
        """A request was served, or failed for a reason that says nothing about load."""
        self.num_under_way -= 1
        self._limit = min(self._maximum, self._limit + 1.0 / self._limit)

    def refused(self, ticket: int) -> None:
        """The server said that it has too much to do."""
        self.num_under_way -= 1
        self.num_refused += 1
        if ticket > self._recovery_until:
            self._limit = max(MIN_LIMIT, self._limit * self._decrease)
            self._recovery_until = self._num_sent
