# ruff: noqa: PTH110
# Between fork and exec pathlib costs more than it clarifies.
"""The warm launcher: an interpreter that has imported pytest, and nothing of any repository.

`start` turns a bare interpreter into that of the environment; the runner imports pytest there and calls `serve`.
A run is then three forks of it, and its test process goes on where a cold one has got to after its imports. What an
exec would have thrown away is thrown away here: descriptors, signals, paths of the host, modules of ours.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from . import main as launcher
from . import syscalls as sc
from .namespaces import enter_with_readonly
from .process import Job

_FIRST_FREE_FD, _MAX_FD = 4, 1 << 20
# What an empty run of pytest imports besides its own modules, or a failing test, or a pyproject.toml.
_ALSO_IMPORTED = ("code", "difflib", "faulthandler", "pdb", "pprint", "readline", "tomllib", "unittest.case")


def start(message: str) -> None:
    """Become the interpreter that ``message`` names: JSON with ``command``, ``env``, and ``readonly`` or null.

    ``readonly``: the directories of that interpreter. A forked process can reach the file that it executes, by
    ``/proc/self/exe``, as its launcher sees it: so the launcher must not be able to write it either.
    """
    job = json.loads(message)
    if job["readonly"] is not None:
        enter_with_readonly(job["readonly"])
    os.execve(job["command"][0], job["command"], job["env"])


def serve(fd: int, run: Callable[[dict[str, Any]], None]) -> None:
    """Serve jobs from the socket ``fd``; a test process calls ``run`` with the configuration of its job."""
    for name in _ALSO_IMPORTED:
        if importlib.util.find_spec(name) is not None:  # an interpreter may have been built without readline
            importlib.import_module(name)
    inspect.getmodule(serve.__code__)  # resolves the file of every module once, as each first traceback would
    gc.collect()
    host_paths = [path for path in sys.path if os.path.exists(path)]

    def program(job: Job) -> NoReturn:
        os.closerange(_FIRST_FREE_FD, _MAX_FD)  # before anything else: one of them is the supervisor's
        argv, environment = job["argv"], job["env"]
        job.clear()
        try:
            _forget(argv, environment, host_paths)
            run(json.loads(argv[-1]))
        finally:
            _leave()

    launcher.main(fd, program)


def _forget(argv: list[str], environment: dict[str, str], host_paths: list[str]) -> None:
    """Make this process look as if it had been started with ``argv`` and ``environment``, in this file system."""
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:], sys.argv[:] = argv, argv[-2:]
    sys.modules["__main__"].__file__ = argv[-2]
    sys.path[:] = [path for path in sys.path if path not in host_paths or os.path.exists(path)]
    sys.path_importer_cache.clear()
    package = __name__.rsplit(".", 1)[0]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    gc.enable()


def _leave() -> NoReturn:
    """End this process as an interpreter ends whose program raised: this one must not return to its launcher."""
    error = sys.exc_info()[1]
    code = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code is not None and not isinstance(error.code, int):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            traceback.print_exception(error)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
