"""Calls of git plumbing with an environment of our own.

git reads no configuration, hook, attribute or credential of the machine: only the file written by
`write_git_config`, and the repository's own objects.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """\
[safe]
	directory = *
[core]
	hooksPath = /dev/null
	fsmonitor = false
	autocrlf = false
	attributesFile = /dev/null
	logAllRefUpdates = false
[gc]
	auto = 0
[maintenance]
	auto = false
[protocol "ext"]
	allow = never
[init]
	defaultBranch = main
[advice]
	detachedHead = false
"""


class GitFailed(Exception):
    """A git command exited with an error; the message is the last line that it wrote."""

    def __init__(self, command: str, returncode: int, stderr: str) -> None:
        lines = [line for line in stderr.strip().splitlines() if line.strip()]
        super().__init__(f"git {command}: {lines[-1] if lines else f'exit code {returncode}'}")
        self.returncode = returncode
        self.stderr = stderr


@dataclass(frozen=True, kw_only=True)
class Git:
    """Runs git for one object store directory."""

    config_path: Path

    def run(
        self,
        *arguments: str,
        git_dir: Path | None = None,
        stdin: bytes = b"",
        extra_env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> bytes:
        """Return what git wrote on standard output.

        Raises:
            GitFailed: it exited with an error.
            subprocess.TimeoutExpired: it did not end within ``timeout_s``; it was killed.
        """
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self.config_path),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            **(extra_env or {}),
        }
        if git_dir is not None:
            environment["GIT_DIR"] = str(git_dir)
        done = subprocess.run(
            ["git", *arguments],
            input=stdin,
            capture_output=True,
            env=environment,
            cwd="/",
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise GitFailed(arguments[0], done.returncode, done.stderr.decode(errors="replace"))
        return done.stdout


def write_git_config(path: Path) -> Git:
    """Write the configuration that every call uses and return the runner."""
    path.write_text(_CONFIG)
    return Git(config_path=path)
