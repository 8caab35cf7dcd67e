"""Canaries: they fail whatever the code does, honest runs do not notice them, and what they find is judged twice."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import VerdictStatus as S
from dockyard_sandbox.canaries import NUM_CANARIES, choose, find_candidates, make_flock
from dockyard_sandbox.jailer import Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.literals import decisive_values, leaves, mutate
from dockyard_sandbox.prepare import Prepared
from dockyard_sandbox.trials import Trials
from dockyard_sandbox.wire import Limits, TaskRequest

SOURCE = '''"""Doc."""
import unittest


class A(unittest.TestCase):
    def test_a(self):
        """Doc."""
        self.assertEqual(add(2, 3), 5)

    def test_loop(self):
        for i in range(3):
            self.assertEqual(i, i)
        self.assertEqual(add(2, 3), [1,
                                     2])

    def helper(self):
        return 3


def test_text():
    assert f(2) == """a
b"""

@decorated
def test_decorated():
    assert f(2) == 3

def test_early():
    if f(2):
        return
    assert f(2) == 3

def test_computed(): assert f(2) == f(3)


class B:

    def test_approx(self):
        assert g() == pytest.approx(-0.5)
'''
IDS = [
    *("t.py::A::test_a", "t.py::A::test_loop", "t.py::test_text", "t.py::test_decorated", "t.py::test_early"),
    *("t.py::test_computed", "t.py::B::test_approx"),
]


def functions(source: bytes) -> dict[str, tuple[int, str]]:
    """Qualified name to (line, code) of every function."""
    found = {}
    module = ast.parse(source)
    for node in module.body:
        scope = [(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else [("", [node])]
        for prefix, body in scope:
            found.update(
                {f"{prefix}{one.name}": (one.lineno, ast.dump(one)) for one in body if isinstance(one, ast.FunctionDef)}
            )
    return found


def test_only_straight_tests_with_a_written_value_are_copied() -> None:
    found = find_candidates("t.py", SOURCE.encode(), IDS)
    assert {one.original for one in found} == {"t.py::A::test_a", "t.py::test_text", "t.py::B::test_approx"}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("ending", ["", "\n", "\n\n\n"])
@pytest.mark.parametrize("is_proven", [False, True])
def test_no_other_test_changes_its_place(newline: str, ending: str, is_proven: bool) -> None:
    source = (SOURCE.rstrip("\n") + ending).replace("\n", newline).encode()
    candidates = find_candidates("t.py", source, IDS)
    before = functions(source)
    for _ in range(50):
        flock = make_flock(candidates, {"t.py": source}, frozenset(IDS if is_proven else ()))
        after = functions(flock.files["t.py"])
        assert before.items() <= after.items()
        added = {"t.py::" + name.replace(".", "::") for name in after.keys() - before.keys()}
        assert added == {canary.test for canary in flock.canaries}
        assert len(added) == len(candidates)
        for canary in flock.canaries:
            own, original = (one.removeprefix("t.py::").replace("::", ".") for one in (canary.test, canary.original))
            assert after[own][0] > before[original][0]  # it runs after the test that it copies


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"\xff\xfe", b"x = 1\r", b"\x0c\ndef test_a():\n    assert f() == 1\n"]
)
def test_a_file_that_cannot_be_read_gives_no_canary(source: bytes) -> None:
    assert find_candidates("t.py", source, ["t.py::test_a"]) == ()


def test_test_files_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 counts the depth of the trees of all threads together: two at once now and then gave SystemError."""
    active, most, parse = [], [], ast.parse

    def slowly(text: str) -> ast.Module:
        active.append(text)
        most.append(len(active))
        time.sleep(0.01)
        active.pop()
        return parse(text)

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", slowly)
        source, ids = b"def test_a(): assert f(2) == 3\n", ["a.py::test_a"]
        found = list(pool.map(lambda _: find_candidates("a.py", source, ids), range(8)))
    assert len(most) == len(found) == 8
    assert set(most) == {1}


def test_every_run_has_names_values_and_places_of_its_own() -> None:
    source = TEST.replace(b"!= 2", b"== 2") + b"\n\ndef test_4():\n    assert f() == 'text'\n"
    candidates = find_candidates("t.py", source, ["t.py::test_f", "t.py::test_p", "t.py::test_4"])
    flocks = [make_flock(candidates, {"t.py": source}, frozenset(["t.py::test_f"])) for _ in range(100)]
    assert len({flock.files["t.py"] for flock in flocks}) == 100
    assert len({canary.test for flock in flocks for canary in flock.canaries}) > 100
    assert len({functions(flock.files["t.py"])[flock.canaries[0].test[6:]][0] for flock in flocks}) > 1


def test_an_original_of_each_set_is_chosen() -> None:
    candidates = find_candidates("t.py", SOURCE.encode(), IDS)
    for _ in range(20):
        chosen = choose(candidates, ["t.py::test_text"])
        assert len(chosen) == NUM_CANARIES
        assert "t.py::test_text" in {one.original for one in chosen}
    assert choose((), IDS) == ()


@pytest.mark.parametrize(
    "literal",
    [
        *("0", "1", "-7", "12345678901234567890", "0.0", "-2.5", "1e300", "''", "'a'", "'42'", "'É'", "b'x'"),
        *("True", "None", "[1, 'a', (2.0, None)]", "{'k': 1}", "{1, 2}", "'a\\nb'"),
    ],
)
def test_another_value_is_never_equal(literal: str) -> None:
    was = ast.literal_eval(literal)
    for seed in range(200):
        function = ast.parse(f"def test_x():\n    assert f() == {literal}\n").body[0]
        assert isinstance(function, ast.FunctionDef)
        (value,) = decisive_values(function)
        mutate(random.Random(seed).choice(leaves(value)), random.Random(seed))
        now = eval(compile(ast.Expression(ast.fix_missing_locations(value)), "x", "eval"))
        assert now != was
        if isinstance(was, str):
            assert now.lower() != was.lower()
        if isinstance(was, int | float) and not isinstance(was, bool):
            assert now != pytest.approx(was, rel=0.1, abs=2)


def test_what_is_not_written_in_the_test_is_not_decisive() -> None:
    body = (
        "assert 1 == 1; assert f() != 1; assert f() == x; assert f() in [1]; self.assertTrue(f()); assert f() == [g()]"
    )
    function = ast.parse(f"def test_x(self): {body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert decisive_values(function) == []


TEST = b"from m import f\n\n\ndef test_f():\n    assert f() == 1\n\n\ndef test_p():\n    assert f() != 2\n"
REQUEST = TaskRequest.model_validate(
    {"instance_id": "i", "repo": "r", "base_commit": "0" * 40, "FAIL_TO_PASS": ["t.py::test_f"]}
)


class FakeJail:
    """Stands for the jail and the preparer: each run reports what the next script says of (originals, canary)."""

    def __init__(self, *scripts: str, flags: tuple[str, ...] = ()) -> None:
        self.scripts = list(scripts)
        self.flags = flags
        self.names: list[str] = []

    async def prepare(self, request: TaskRequest) -> Prepared:
        work = Workload(
            lower=Path("/"),
            files={},
            deleted=[],
            readonly=[],
            pytest_arguments=["t.py"],
            timeout_s=1.0,
            limits=Limits(),
        )
        return Prepared(
            workload=work, xfail_files=frozenset(), test_files={"t.py": (False, TEST)}, flags=self.flags, tree_key="k"
        )

    async def run(self, workload: Workload) -> RunResult:
        script = self.scripts.pop(0)
        source = workload.files["t.py"][1].decode()
        (canary,) = {f"t.py::{name}" for name in functions(source.encode())} - {"t.py::test_f", "t.py::test_p"}
        self.names.append(canary)
        outcomes = {"t.py::test_f": "passed", canary: "failed"}
        if script in ("fails", "met by chance"):
            outcomes["t.py::test_f"] = "failed"
        if script == "met by chance" or script == "forged":
            outcomes[canary] = "passed"
        elif script == "left out":
            del outcomes[canary]
        code = int("failed" in outcomes.values())
        records: list[dict[str, Any]] = [{"collected": list(outcomes)}]
        for test, outcome in outcomes.items():
            for when in ("setup", "call", "teardown"):
                records.append({"id": test, "when": when, "outcome": outcome if when == "call" else "passed"})
        records.append({"end": code})
        lines = "".join(json.dumps({"n": number, **record}) + "\n" for number, record in enumerate(records))
        end = "launcher_died" if script == "infra" else "exited"
        return RunResult(
            end=end,
            exit_code=code,
            output=b"",
            records=lines.encode(),
            start_s=0,
            test_s=0,
            cpu_s=0,
            max_rss_kb=0,
        )


def verdict_of(jail: FakeJail) -> Any:
    trials = Trials(jail.run, jail.prepare, isolation="namespaces")

    async def ask() -> Any:
        prepared = await jail.prepare(REQUEST)
        return await trials.verdict(REQUEST, prepared)

    found = asyncio.run(ask())
    assert jail.scripts == []
    return found


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        (["fails", "honest"], S.RESOLVED),
        (["fails", "fails"], S.UNRESOLVED),
        (["fails", "met by chance"], S.UNRESOLVED),  # a wrong fix gives the canary's value
        (["fails", "forged", "forged"], S.TAMPERED),
        (["fails", "forged", "honest", "honest", "honest"], S.RESOLVED),  # by chance
        (["fails", "forged", "honest", "forged"], S.TAMPERED),
        (["fails", "forged", "fails"], S.UNRESOLVED),
        (["fails", "left out"], S.RESOLVED),  # never proven to be run
        (["honest", "left out", "left out"], S.TAMPERED),
        (["infra", "honest"], S.RESOLVED),
        (["infra", "infra"], S.INFRA_ERROR),
    ],
)
def test_what_a_canary_finds_is_judged_twice(scripts: list[str], status: S) -> None:
    """The first script is the run of the unpatched tree."""
    assert verdict_of(FakeJail(*scripts)).status is status


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        (["honest", "honest", "honest"], S.RESOLVED),
        (["honest", "fails"], S.TAMPERED),
        (["honest", "honest", "forged"], S.TAMPERED),
        (["honest", "infra"], S.INFRA_ERROR),
        (["fails"], S.UNRESOLVED),
    ],
)
def test_a_flagged_fix_has_to_resolve_every_time(
    scripts: list[str], status: S, caplog: pytest.LogCaptureFixture
) -> None:
    verdict = verdict_of(FakeJail("fails", *scripts, flags=("scan:native:m.py",)))
    assert (verdict.status, verdict.is_resolved) == (status, status is S.RESOLVED)
    if status in (S.RESOLVED, S.TAMPERED):
        assert "audit:" in caplog.text
    if status is S.TAMPERED:
        assert verdict.pass_rate == 0.0


STATEFUL = {
    "calc/__init__.py": "",
    "calc/ops.py": "SEEN = []\n\n\ndef once(x):\n    SEEN.append(x)\n    return len(SEEN)\n\n\n"
    "def new(x):\n    return None\n",
    "tests/test_kept.py": "from calc.ops import once\n\n\ndef test_first():\n    assert once('a') == 1\n\n\n"
    "def test_second():\n    assert once('a') == 2\n",
}
FIRST_TIME = "from calc.ops import new\n\n\ndef test_new():\n    assert new('b') is True\n"


def test_tests_that_cannot_be_run_twice_are_not_accused(new_project: Any, judge: Any, tmp_path: Path) -> None:
    """A kept test counts its calls, and what is new the first time is not new when a canary asks again."""
    project = new_project(tmp_path / "stateful", STATEFUL)
    fixed = STATEFUL["calc/ops.py"].replace("return None", "return x not in SEEN and once(x) > 0")
    task = project.task(
        test_patch=project.patch({"tests/test_new.py": FIRST_TIME}),
        fail_to_pass=("tests/test_new.py::test_new",),
        pass_to_pass=("tests/test_kept.py::test_first", "tests/test_kept.py::test_second"),
        test_command="pytest tests/test_kept.py tests/test_new.py",
    )
    verdict = judge(task, project.patch({"calc/ops.py": fixed}))
    assert (verdict.status, verdict.flags) == (S.RESOLVED, ()), verdict


def test_a_resolved_verdict_says_how_many_canaries_failed(project: Any, judge: Any) -> None:
    verdict = judge(project.task(), project.gold())
    assert verdict.detail.endswith("2 canaries failed as they must")
    assert set(verdict.tests) == set(project.task().fail_to_pass + project.task().pass_to_pass)


def test_stopping_at_the_first_failure_is_ignored(project: Any, judge: Any) -> None:
    """Or a canary, or a test that does not decide, could end the run before the deciding ones."""
    assert judge(project.task(test_command="pytest -x tests"), project.gold()).status is S.RESOLVED


INCREMENTAL = """import pytest


def pytest_runtest_makereport(item, call):
    if call.excinfo is not None:
        item.session.had_failure = True


def pytest_runtest_setup(item):
    if getattr(item.session, "had_failure", False):
        pytest.skip("a test failed before")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "kept" in item.nodeid)
"""


def test_where_canaries_would_change_an_honest_run_there_are_none(new_project: Any, judge: Any, tmp_path: Path) -> None:
    """This repository skips what follows a failure, and runs its other tests last."""
    files = {**STATEFUL, "tests/conftest.py": INCREMENTAL, "calc/ops.py": "def once(x):\n    return 1\n"}
    files["tests/test_kept.py"] = "from calc.ops import once\n\n\ndef test_first():\n    assert once('a') == 1\n"
    project = new_project(tmp_path / "incremental", files)
    new = "from calc.ops import new\n\n\ndef test_new():\n    assert new('b') == 3\n"
    kept_too = "def test_old():\n    assert len('b') == 1\n"
    task = project.task(
        test_patch=project.patch({"tests/test_new.py": new, "tests/test_old.py": kept_too}),
        fail_to_pass=("tests/test_old.py::test_old",),
        pass_to_pass=("tests/test_kept.py::test_first",),
    )
    verdict = judge(task, project.patch({"calc/ops.py": files["calc/ops.py"] + "\n\ndef new(x):\n    return 3\n"}))
    assert (verdict.status, verdict.flags) == (S.RESOLVED, ()), verdict
    assert "canaries" not in verdict.detail


def test_a_test_file_that_the_base_cannot_import_keeps_its_canary(project: Any, judge: Any) -> None:
    held_out = "from calc.extra import three\n\n\ndef test_three():\n    assert three() == 3\n"
    task = project.task(
        test_patch=project.patch({"tests/test_three.py": held_out}), fail_to_pass=("tests/test_three.py::test_three",)
    )
    extra = {"calc/extra.py": "def three():\n    return 3\n"}
    verdict = judge(task, project.patch(extra))
    assert verdict.status is S.RESOLVED
    assert verdict.detail.endswith("2 canaries failed as they must")
    equal = {"calc/extra.py": "class Yes:\n    def __eq__(self, other):\n        return True\n\n\nthree = Yes\n"}
    verdict = judge(task, project.patch(equal))
    assert (verdict.status, verdict.flags[0]) == (S.TAMPERED, "canary_passed:tests/test_three.py::test_three")
