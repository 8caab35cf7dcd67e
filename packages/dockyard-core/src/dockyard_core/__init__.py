"""Nouns, protocols and pure mathematics of Dockyard; imports nothing heavy.

`advantage`, `loss` and `batch` need the extra ``dockyard-core[math]`` and are imported by name.
"""

from dockyard_core.errors import (
    ConfigError,
    DataError,
    DockyardError,
    EngineDead,
    GeneratorError,
    LedgerViolation,
    RefitError,
    RefitTimeout,
    RunStalled,
    SandboxError,
    SandboxTimeout,
    SandboxUnavailable,
    UserError,
    WeightMismatch,
)
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest, Generator, SamplingParams, VersionSpan
from dockyard_core.policy import Policy, StepMetrics, WeightChunk, WeightSink
from dockyard_core.rollout import GroupId, Rollout, RolloutGroup, Segment
from dockyard_core.sandbox import Sandbox
from dockyard_core.task import Task
from dockyard_core.verdict import TestStatus, Verdict, VerdictStatus

__all__ = [
    "Completion",
    "ConfigError",
    "DataError",
    "DockyardError",
    "EngineDead",
    "EngineHealth",
    "GenerateRequest",
    "Generator",
    "GeneratorError",
    "GroupId",
    "LedgerViolation",
    "Policy",
    "RefitError",
    "RefitTimeout",
    "Rollout",
    "RolloutGroup",
    "RunStalled",
    "SamplingParams",
    "Sandbox",
    "SandboxError",
    "SandboxTimeout",
    "SandboxUnavailable",
    "Segment",
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
