# ruff: noqa: PTH114, PTH115, PTH118, PTH123
# It starts once per patch that git refuses: pathlib's import costs more than the work.
"""Runs inside the sandbox: GNU patch on a copy of the tree, and what it changed to the record pipe.

Compiled by the server and executed alone, like the runner: the standard library only. Records are JSON
lines on descriptor 3: ``{"path", "mode", "data"}`` (base64), ``{"path", "mode": null}`` for a deleted path,
last ``{"end": exit code}``.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from typing import Any

RECORD_FD = 3
_COMMAND = ("/usr/bin/patch", "--batch", "--fuzz=5", "-p1", "--no-backup-if-mismatch", "-i")


def main(patch_file: str) -> int:
    """Apply ``patch_file`` to the current directory, report, and return GNU patch's exit code."""
    before = _look()
    code = subprocess.run([*_COMMAND, patch_file], stdin=subprocess.DEVNULL, check=False).returncode
    with open(RECORD_FD, "w", encoding="ascii") as pipe:
        if code == 0:
            after = _look()
            for path in sorted(before.keys() | after.keys()):
                if path != patch_file and before.get(path) != after.get(path):
                    pipe.write(json.dumps(_change(path, path in after)) + "\n")
        pipe.write(json.dumps({"end": code}) + "\n")
    return code


def _look() -> dict[str, tuple[int, ...]]:
    """Path to what every write of patch changes: it writes a new file and renames it into place."""
    found: dict[str, tuple[int, ...]] = {}
    for directory, names, files in os.walk("."):
        for name in [*files, *(one for one in names if os.path.islink(os.path.join(directory, one)))]:
            path = os.path.join(directory, name)
            state = os.lstat(path)
            found[path[2:]] = (state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns)
    return found


def _change(path: str, exists: bool) -> dict[str, Any]:
    if not exists:
        return {"path": path, "mode": None}
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return {"path": path, "mode": "120000", "data": base64.b64encode(os.fsencode(os.readlink(path))).decode()}
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    return {"path": path, "mode": "100755" if mode & stat.S_IXUSR else "100644", "data": data}


if __name__ == "__main__":
    exit_code = main(json.loads(sys.argv[1])["patch_file"])
    sys.stdout.flush()
    os._exit(exit_code)
