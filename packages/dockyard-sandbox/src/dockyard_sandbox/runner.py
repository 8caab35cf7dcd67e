# ruff: noqa: E402, PTH109, PTH119, PTH120
# The collector stops before the imports that it would slow down.
"""Runs inside the sandbox: pytest, with every outcome written to the record pipe.

This file is compiled once by the server and executed alone: it must import the standard library
and pytest only, and pytest before any directory of the repository can be imported from. In an image it is
read by whatever the image has, from Python 3.6 and pytest 5 on: see ``portable.py``.

Records are JSON lines on descriptor 3, numbered from 0 without a gap: ``{"n", "collect_error": id}``,
``{"n", "collected": [ids], "marked": [ids], "expecting": [ids], "origins": {file of ids: file executed}}``,
``{"n", "id", "when", "outcome", "raised", "xfail", "imperative"}`` and last ``{"n", "end": exit code,
"changed": [names], "hooks": [files that implement hooks, relative to the root]}``.

What decides is captured before repository code runs: that code can replace any name afterwards.
"""

from __future__ import annotations

import gc

gc.disable()  # importing pytest allocates much and frees little

import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

RECORD_FD = 3


# Functions of pytest and pluggy that make an outcome; replaced at the end of a run = tampered.
_PROBED = (
    ("_pytest.python", "Function.runtest", "Function.setup", "pytest_pyfunc_call", "Module._getobj"),
    ("_pytest.runner", "CallInfo.from_call", "runtestprotocol", "call_and_report", "pytest_runtest_makereport"),
    ("_pytest.runner", "pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call"),
    ("_pytest.reports", "TestReport.from_item_and_call"),
    ("_pytest.skipping", "pytest_runtest_makereport", "pytest_runtest_call"),
    ("_pytest.unittest", "TestCaseFunction.runtest", "TestCaseFunction._addexcinfo"),
    ("unittest.case", "_ShouldStop", "_Outcome.testPartExecutor", "TestCase.run", "TestCase._callTestMethod"),
    ("_pytest.assertion.rewrite", "AssertionRewritingHook.exec_module", "_call_reprcompare"),
    ("_pytest.main", "Session.pytest_runtest_logreport", "wrap_session", "pytest_runtestloop"),
    ("pluggy._callers", "_multicall"),
    ("pluggy._hooks", "HookCaller.__call__", "HookCaller.get_hookimpls"),
    ("pluggy._manager", "PluginManager._hookexec", "PluginManager.register"),
)
# Names of the interpreter that an assertion or a report goes through.
_PROBED_BUILTINS = ("AssertionError", "Exception", "BaseException", "isinstance", "len", "repr", "__build_class__")


def _functions() -> dict[str, tuple[Any, Any]]:
    """Name to (function, its code) of everything probed that this version of pytest has."""
    found = {}
    for module, *names in _PROBED:
        for name in names:
            value: Any = sys.modules.get(module)
            for part in name.split("."):
                value = getattr(value, part, None)
            value = getattr(value, "__func__", value)  # a class method is bound anew by every look-up
            if value is not None:
                found[f"{module}.{name}"] = (value, getattr(value, "__code__", None))
    for name in _PROBED_BUILTINS:
        found[f"builtins.{name}"] = (getattr(builtins, name, None), None)
    return found


def _open_pipe() -> Callable[..., None]:
    write, dumps, number = os.write, json.dumps, 0
    getpid, leave, owner = os.getpid, os._exit, os.getpid()

    def record(**fields: Any) -> None:
        nonlocal number
        if getpid() != owner:
            leave(70)  # a test forked and both sides went on: only the first one reports
        line = memoryview(dumps({"n": number, **fields}).encode() + b"\n")
        number += 1
        while line:
            line = line[write(RECORD_FD, line) :]

    return record


class _Origins:
    """Which file each test module was executed from, whatever the module says of itself."""

    def __init__(self) -> None:
        self._executed: dict[int, tuple[Any, str]] = {}

    def watch(self) -> None:
        """Follow pytest's import hook, which every test module passes through."""
        from _pytest.assertion.rewrite import AssertionRewritingHook

        execute, executed = AssertionRewritingHook.exec_module, self._executed

        def exec_module(hook: Any, module: Any) -> None:
            executed[id(module)] = (module, str(module.__spec__.origin))
            execute(hook, module)

        vars_of_hook: Any = AssertionRewritingHook
        vars_of_hook.exec_module = exec_module

    def of(self, module: Any, root: str) -> str:
        """Path relative to ``root``; "" = not executed by pytest."""
        known = self._executed.get(id(module))
        return _below(root, known[1]) if known is not None and known[0] is module else ""


def _plugin(record: Callable[..., None], origins: _Origins) -> Any:
    import pytest
    from _pytest.unittest import TestCaseFunction

    imperative, function, testcase = pytest.xfail.Exception, pytest.Function, TestCaseFunction
    hook_files, root_of = _hook_files, _root_of

    def expects_failure(item: Any) -> bool:
        flag = "__unittest_expecting_failure__"
        return isinstance(item, testcase) and (getattr(item.obj, flag, False) or getattr(item.cls, flag, False))

    class Recorder:
        hooked = True
        hook_files: tuple[str, ...] = ()

        def pytest_configure(self, config: Any) -> None:
            self.hooked = config.getoption("assertmode") != "plain"  # else pytest has no import hook
            config.option.maxfail = 0  # every deciding test is run, whatever fails before it

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, session: Any) -> None:
            self.hook_files = hook_files(session.config.pluginmanager, root_of(session.config))

        def pytest_collection_finish(self, session: Any) -> None:
            root = root_of(session.config)
            files = {
                item.nodeid.split("::", 1)[0]: origins.of(item.module, root)
                for item in session.items
                if self.hooked and isinstance(item, function)
            }
            record(
                collected=[item.nodeid for item in session.items],
                marked=[item.nodeid for item in session.items if item.get_closest_marker("xfail")],
                expecting=[item.nodeid for item in session.items if expects_failure(item)],
                origins=files,
            )

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                record(collect_error=report.nodeid)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # the form that every version knows
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
            result = yield
            report, excinfo = result.get_result(), call.excinfo
            record(
                id=item.nodeid,
                when=call.when,
                outcome=report.outcome,
                raised=None if excinfo is None else excinfo.type.__name__,
                xfail=hasattr(report, "wasxfail"),
                imperative=excinfo is not None and isinstance(excinfo.value, imperative),
            )

    return Recorder()


def _root_of(config: Any) -> str:
    return str(getattr(config, "rootpath", None) or config.rootdir)  # its name before pytest 6.1


def _below(root: str, path: str) -> str:
    return path[len(root) + 1 :] if path.startswith(root + os.sep) else path


def _hook_files(manager: Any, root: str) -> tuple[str, ...]:
    """What implements hooks besides pytest, the environment and conftest files: plugins of the tree, or of a patch.

    Paths are relative to ``root`` where they lie below it.
    """
    installed = tuple(
        {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(sys.modules["pytest"].__file__ or ""))}
    )
    files = set()
    for caller in list(vars(manager.hook).values()):
        for implementation in getattr(caller, "get_hookimpls", list)():
            code = getattr(implementation.function, "__code__", None)
            file = getattr(code, "co_filename", None) or type(implementation.function).__name__
            if not file.startswith(installed) and os.path.basename(file) not in ("conftest.py", "runner.py"):
                files.add(_below(root, file))
    return tuple(sorted(files))


def load(import_paths: list[str]) -> None:
    """Import pytest and all of its own that a run needs."""
    sys.path[:0] = import_paths
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    _prepare_unittest()
    getattr(gc, "freeze", int)()  # since 3.7


def run(arguments: list[str]) -> int:
    """Run pytest on ``arguments`` in the current directory and return its exit code."""
    import pytest

    record, origins, probe = _open_pipe(), _Origins(), _functions
    origins.watch()
    before = probe()
    sys.path.insert(0, os.getcwd())  # what `python -m pytest` does
    recorder = _plugin(record, origins)
    code = int(pytest.main(arguments, plugins=[recorder]))
    after = probe()
    changed = [name for name, known in before.items() if not _same(known, after.get(name))]
    record(end=code, changed=changed, hooks=recorder.hook_files)
    return code


def _prepare_unittest() -> None:
    """Let unittest swallow nothing: it takes its private stop signal for a pass, whoever raises it."""
    import unittest.case

    private: Any = unittest.case
    private._ShouldStop = ()  # matches no exception; it is for failfast, which pytest does not use


def _same(before: tuple[Any, Any], after: tuple[Any, Any] | None) -> bool:
    return after is not None and before[0] is after[0] and before[1] is after[1]


def execute(configuration: dict[str, Any]) -> None:
    """Run the tests that ``configuration`` names and leave. Raises what pytest lets through."""
    exit_code = run(configuration["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # nothing left to say: skip the interpreter's teardown and atexit hooks


def serve_warm(fd: int, package: str) -> None:
    """Fork a test process for every job from the socket ``fd``: the warm path, whose code lies in ``package``."""
    sys.path.insert(0, package)
    zygote = importlib.import_module("jail.zygote")
    sys.path.remove(package)
    zygote.serve(fd, execute)


if __name__ == "__main__":
    configuration = json.loads(sys.argv[1])
    load(configuration["import_paths"])
    if "channel" in configuration:
        serve_warm(configuration["channel"], configuration["package"])
    else:
        gc.enable()
        execute(configuration)
