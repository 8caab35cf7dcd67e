"""The parts behind the routes."""

from __future__ import annotations

from dataclasses import dataclass, field

from dockyard_sandbox.bodies import Bodies
from dockyard_sandbox.environments import EnvironmentStore
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.metrics import Metrics
from dockyard_sandbox.queueing import Admission
from dockyard_sandbox.sessions import SessionStore
from dockyard_sandbox.tasks import TaskBoard


@dataclass(frozen=True, kw_only=True)
class Service:
    """The parts of one server."""

    executor: Executor
    environments: EnvironmentStore
    admission: Admission
    board: TaskBoard
    sessions: SessionStore
    metrics: Metrics
    bodies: Bodies = field(default_factory=Bodies)
    notes: tuple[str, ...] = ()
    """What this machine lacks, for ``/readyz``."""
