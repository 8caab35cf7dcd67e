"""An environment that a tool of this folder makes: made once for its content, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def interpreter_of(name: str, tool: Path, variable: str, content: bytes) -> Path | str:
    """The interpreter that the environment variable names, or else that of the kept environment.

    Args:
        name: of the environment.
        tool: ``tool VENV`` makes it.
        variable: an environment variable with an interpreter to use instead.
        content: what decides what is in it; another content is another environment.

    Returns why there is none otherwise, as text.
    """
    named = os.environ.get(variable)
    if named:
        return Path(named) if os.access(named, os.X_OK) else f"{variable}={named} is no interpreter"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dockyard"
    venv = cache / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    done = venv / "dockyard-complete"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            made = subprocess.run([sys.executable, tool, venv], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                last = " | ".join((made.stdout + made.stderr).strip().splitlines()[-3:])
                return f"no environment {name}: {last}; or name an interpreter in {variable}"
            done.touch()
    return venv / "bin" / "python"
