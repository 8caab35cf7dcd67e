"""The problem shown to the policy, with what decides whether it was solved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem: a repository at a commit, a statement, and the tests that decide.

    Field names follow SWE-bench (Jimenez et al., arXiv:2310.06770) so that its rows load unchanged.
    """

    instance_id: str
    repo: str
    """A name registered with the sandbox, a local path, or a ``file://`` / ``https://`` URL."""
    base_commit: str
    problem_statement: str
    test_patch: str
    """Unified diff of the held-out tests. Never shown to the policy."""
    fail_to_pass: tuple[str, ...]
    """pytest node ids that fail at ``base_commit`` and must pass."""
    pass_to_pass: tuple[str, ...] = ()
    """pytest node ids that pass at ``base_commit`` and must still pass."""
    gold_patch: str | None = None
    """The known fix; None where the dataset has none. Never shown to the policy."""
    prompt_files: tuple[tuple[str, str], ...] = ()
    """(path, text at ``base_commit``) shown in the prompt, in this order."""
    environment: str | None = None
    """Sandbox environment id; None = the executor's own interpreter."""
    test_command: str | None = None
    """None = pytest on the files of the deciding tests."""
    plugins: tuple[str, ...] = ()
    """Plug-ins of pytest that the tests need, as its ``-p`` takes them; "auto" = whatever is installed."""
    timeout_s: float = 60.0
    """Wall-clock limit of the test run. Passing it is the policy's failure, not ours."""
    apply: Literal["strict", "swebench"] = "strict"
    labels: tuple[tuple[str, str], ...] = field(default=())
    """(name, value) pairs for tables, such as ("bug_class", "operator")."""
