"""`checkpoint.must_save_by`: when a run with a time limit has to save and stop."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"(?:(?:(\d+):)?(\d{1,2}):)?(\d{1,2}):(\d{2})", re.ASCII)
_MARGIN = 1.2
"""The next step or save may take longer than the longest one so far, by this factor."""


@dataclass(frozen=True)
class SaveBy:
    """A limit on the wall clock of a run's life, from its start."""

    limit_s: float
    """Seconds; the last save must be over by then."""

    @classmethod
    def parse(cls, text: str) -> SaveBy:
        """Read ``[[DD:]HH:]MM:SS``: days, hours, minutes, seconds.

        Raises ValueError for any other form, for parts out of range (the first part alone may be large), and
        for no time at all.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"must be [[DD:]HH:]MM:SS, got {text!r}; half an hour is 00:30:00")
        days, hours, minutes, seconds = (None if part is None else int(part) for part in match.groups())
        assert minutes is not None, "the form demands minutes and seconds"
        assert seconds is not None, "the form demands minutes and seconds"
        is_over = seconds > 59 or (hours is not None and minutes > 59) or (days is not None and (hours or 0) > 23)
        if is_over:
            raise ValueError(
                f"must have hours below 24 after days, minutes and seconds below 60, got {text!r}; carry them over"
            )
        total_s = (((days or 0) * 24 + (hours or 0)) * 60 + minutes) * 60 + seconds
        if total_s == 0:
            raise ValueError(f"must leave some time, got {text!r}; half an hour is 00:30:00")
        return cls(float(total_s))

    def is_near(self, elapsed_s: float, longest_step_s: float, save_s: float) -> bool:
        """Whether, with one more step, the save after it might not be over in time.

        Ask it between steps; when it says yes, save and stop.

        Args:
            elapsed_s: since the start.
            longest_step_s: the longest step so far, with what is done between steps.
            save_s: the longest save so far, or a guess.
        """
        return elapsed_s + _MARGIN * (longest_step_s + save_s) >= self.limit_s
