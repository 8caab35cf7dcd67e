"""Trackers: a step's figures, where people compare runs. They can neither stop nor slow a run.

`make_tracker` puts every tracker behind a `BackgroundTracker`: its own thread, a bounded queue, and
failures that are counted and said once.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from dockyard_core import ConfigError

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

_logger = logging.getLogger(__name__)
_SECTIONS = (("val_", "held_out"), ("time_", "time"), ("refit_", "refit"))


class Tracker(Protocol):
    """Takes the scalars of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` at ``step``, the number of the optimizer step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardTracker:
    """Event files for TensorBoard, by its own writer; neither torch nor TensorFlow is imported.

    Args:
        log_dir: made at the first `log`.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._writer: EventFileWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with a scalar per value, and hand it to the kernel. Raises OSError."""
        # TensorBoard's own switch for its file layer without TensorFlow, wherever that is installed.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._log_dir))
            # What an earlier life of the run wrote for this step and later ones is rolled back: readers drop it.
            self._writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class BackgroundTracker:
    """Hands everything to ``inner`` in a daemon thread; `log` returns at once and never raises.

    A full queue drops the newest values. What is lost is counted, and said once through ``report``.

    Args:
        inner: the tracker; only the thread calls it.
        name: what ``report`` calls it.
        capacity: steps that may wait.
        close_timeout_s: how long `close` waits for ``inner``, seconds.
        report: takes one line; None = this module's logger.
    """

    def __init__(
        self,
        inner: Tracker,
        *,
        name: str | None = None,
        capacity: int = 256,
        close_timeout_s: float = 5.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.num_errors = 0
        """Calls of ``inner`` that raised."""
        self.num_dropped = 0
        """Steps that found the queue full, or were still in it at the end."""
        self._inner = inner
        self._name = name or type(inner).__name__
        self._report = report or _logger.warning
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[tuple[int, dict[str, float]]] = queue.Queue(capacity)
        self._said: set[str] = set()
        self._closing = threading.Event()
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a copy of ``values``."""
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self.num_dropped += 1
            self._say("queue", f"is too slow: {self._queue.maxsize} steps wait, newer ones are dropped")
        else:
            self._wake.release()

    def close(self) -> None:
        """Wait for what is queued, at most ``close_timeout_s``; what is left then is dropped."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.release()
            self._thread.join(self._close_timeout_s)
            if self._thread.is_alive():
                self.num_dropped += self._queue.qsize()
                self._say("close", f"did not finish in {self._close_timeout_s:g} s and is left behind")

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            try:
                step, values = self._queue.get_nowait()
            except queue.Empty:
                self._call(self._inner.close)  # only `close` releases without an item
                return
            self._call(self._inner.log, step, values)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001  no failure of a tracker may reach the run
            self.num_errors += 1
            self._say("error", f"failed ({type(error).__name__}: {' '.join(str(error).split())})")

    def _say(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._report(f"tracker {self._name} {what}; the run goes on, metrics.jsonl has every step")


class TrackerGroup:
    """Several trackers as one; none at all is fine."""

    def __init__(self, members: Sequence[Tracker]) -> None:
        self._members = tuple(members)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand ``values`` to each."""
        for member in self._members:
            member.log(step, values)

    def close(self) -> None:
        """Close each."""
        for member in self._members:
            member.close()


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = MappingProxyType(
    {"tensorboard": lambda run_dir: TensorBoardTracker(run_dir / "tensorboard")}
)


def make_tracker(names: Sequence[str], run_dir: Path, *, report: Callable[[str], None] | None = None) -> TrackerGroup:
    """The trackers of ``logging.trackers``, each in the background.

    Args:
        names: keys of ``TRACKERS``; a repeated one counts once.
        run_dir: they write below it.
        report: takes a line when one fails for the first time; None = this module's logger.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"logging.trackers must be of {', '.join(TRACKERS)}, got {name!r}; leave it out")
    return TrackerGroup(
        [BackgroundTracker(TRACKERS[name](run_dir), name=name, report=report) for name in dict.fromkeys(names)]
    )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl as ``section/name``; ``dropped`` has one per cause."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": float(number) for inner, number in value.items() if isinstance(number, Real)}
        elif isinstance(value, Real) and name != "step":
            section = next((section for prefix, section in _SECTIONS if name.startswith(prefix)), "train")
            found[f"{section}/{name}"] = float(value)
    return found
