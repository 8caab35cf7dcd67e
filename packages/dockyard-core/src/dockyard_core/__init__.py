"""Nouns, protocols and pure mathematics of Dockyard; imports nothing heavy.

`advantage`, `loss` and `batch` need the extra ``dockyard-core[math]`` and are imported by name.
"""

from dockyard_core.errors import (
    ConfigError,
    DataError,
    DockyardError,
    EngineBusy,
    EngineDead,
    GeneratorError,
    LedgerViolation,
    RefitCalledOff,
    RefitError,
    RefitTimeout,
    RunStalled,
    SandboxBusy,
    SandboxError,
    SandboxTimeout,
    SandboxUnavailable,
    UserError,
    WeightMismatch,
)
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest, Generator, SamplingParams, VersionSpan
from dockyard_core.policy import Policy, PolicySnapshot, StepMetrics, WeightChunk, WeightSink
from dockyard_core.rollout import GroupId, Rollout, RolloutGroup, Segment
from dockyard_core.sandbox import ExecResult, Sandbox, SandboxSession, SessionResult, SessionSandbox
from dockyard_core.task import Task
from dockyard_core.verdict import TestStatus, Verdict, VerdictStatus

__all__ = [
    "Completion",
    "ConfigError",
    "DataError",
    "DockyardError",
    "EngineBusy",
    "EngineDead",
    "EngineHealth",
    "ExecResult",
    "GenerateRequest",
    "Generator",
    "GeneratorError",
    "GroupId",
    "LedgerViolation",
    "Policy",
    "PolicySnapshot",
    "RefitCalledOff",
    "RefitError",
    "RefitTimeout",
    "Rollout",
    "RolloutGroup",
    "RunStalled",
    "SamplingParams",
    "Sandbox",
    "SandboxBusy",
    "SandboxError",
    "SandboxSession",
    "SandboxTimeout",
    "SandboxUnavailable",
    "Segment",
    "SessionResult",
    "SessionSandbox",
    "StepMetrics",
    "Task",
    "TestStatus",
    "UserError",
    "Verdict",
    "VerdictStatus",
    "VersionSpan",
    "WeightChunk",
    "WeightMismatch",
    "WeightSink",
]
