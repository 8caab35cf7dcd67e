"""The HTTP contract: shapes, refusals, idempotency, batches, sharing."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import start_server
from dockyard_sandbox.app import Api


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["field"]


def test_a_reply_has_the_fields_of_the_contract(project: Any, judge: Any, body: Any) -> None:
    reply = judge.post(body(project.task(), project.gold())).json()
    assert set(reply) == {
        *("task_id", "status", "resolved", "pass_rate", "fail_to_pass", "pass_to_pass", "tests", "flags", "isolation"),
        *("duration_s", "log", "evidence", "retryable", "cached", "detail"),
    }
    assert reply["resolved"] is True
    assert reply["fail_to_pass"] == {"passed": 1, "total": 1}
    assert reply["tests"] == {"tests/test_add.py::test_add": "passed", "tests/test_ops.py::test_mul": "passed"}
    assert {"queue", "apply", "start", "test", "total"} <= set(reply["duration_s"])
    assert reply["evidence"].startswith("sha256:")
    assert reply["isolation"] == judge.server.isolation == "namespaces"


def test_test_lists_may_be_json_strings(project: Any, judge: Any, body: Any) -> None:
    task = body(project.task(), project.gold())
    task["FAIL_TO_PASS"] = json.dumps(task["FAIL_TO_PASS"])
    assert judge.post(task).json()["status"] == "resolved"


BAD = {
    "unknown field": ({"model_pach": ""}, (422, "model_pach")),
    "no deciding test": ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, (422, "")),
    "test id without a file": ({"FAIL_TO_PASS": ["test_add"]}, (422, "FAIL_TO_PASS")),
    "test id outside the tree": ({"FAIL_TO_PASS": ["../x.py::test"]}, (422, "FAIL_TO_PASS")),
    "test id that is an option": ({"FAIL_TO_PASS": ["--co::x"]}, (422, "FAIL_TO_PASS")),
    "test id that is not normal": ({"FAIL_TO_PASS": ["./tests/x.py::test"]}, (422, "FAIL_TO_PASS")),
    "test id with an empty part": ({"FAIL_TO_PASS": ["tests//x.py::test"]}, (422, "FAIL_TO_PASS")),
    "list that is not JSON": ({"FAIL_TO_PASS": "__import__('os')"}, (422, "FAIL_TO_PASS")),
    "same id in both": ({"PASS_TO_PASS": ["tests/test_add.py::test_add"]}, (422, "")),
    "commit that is an option": ({"base_commit": "--upload-pack=x"}, (422, "base_commit")),
    "zero timeout": ({"timeout_s": 0}, (422, "timeout_s")),
    "limit below the floor": ({"limits": {"pids": 0}}, (422, "limits.pids")),
    "shell as test command": ({"test_command": "sh -c true"}, (422, "test_command")),
    "preset that is not there": ({"apply": "fuzzy"}, (422, "apply")),
    "environment that is not there": ({"environment": "python-1.5"}, (422, "environment")),
    "environment that is a path": ({"environment": "../x"}, (422, "environment")),
    "repo that does not exist": ({"repo": "/nowhere/at/all"}, (422, "repo")),
    "empty repo": ({"repo": ""}, (422, "repo")),
    "commit that does not exist": ({"base_commit": "0" * 40}, (422, "base_commit")),
    "test in a file that is nowhere": (
        {"FAIL_TO_PASS": ["tests/test_nowhere.py::test_add"]},
        (422, "FAIL_TO_PASS"),
    ),
    "kept test in a file that is nowhere": ({"PASS_TO_PASS": ["nowhere/t.py::test_add"]}, (422, "PASS_TO_PASS")),
    "empty commit": ({"base_commit": ""}, (422, "base_commit")),
    "empty test id": ({"FAIL_TO_PASS": [""]}, (422, "FAIL_TO_PASS")),
    "number for an id": ({"FAIL_TO_PASS": [1]}, (422, "FAIL_TO_PASS.0")),
    "null for a list": ({"FAIL_TO_PASS": None}, (422, "FAIL_TO_PASS")),
    "object for a list": ({"PASS_TO_PASS": {}}, (422, "PASS_TO_PASS")),
    "same id twice": ({"FAIL_TO_PASS": ["t.py::a", "t.py::a"]}, (422, "FAIL_TO_PASS")),
    "number for a patch": ({"model_patch": 1}, (422, "model_patch")),
    "null for a patch": ({"model_patch": None}, (422, "model_patch")),
    "text for a timeout": ({"timeout_s": "soon"}, (422, "timeout_s")),
    "endless timeout": ({"timeout_s": 1e9}, (422, "timeout_s")),
    "timeout that is no number": ({"timeout_s": float("nan")}, (422, "timeout_s")),
    "list for limits": ({"limits": []}, (422, "limits")),
    "unknown limit": ({"limits": {"gpus": 1}}, (422, "limits.gpus")),
    "empty name": ({"instance_id": ""}, (422, "instance_id")),
    "relative repo": ({"repo": "../calc"}, (422, "repo")),
    "repo of another protocol": ({"repo": "ext::sh -c true"}, (422, "repo")),
    "lone surrogate": ({"model_patch": "\ud800"}, (422, "model_patch")),
    "oversized patch": ({"model_patch": "x" * (1024 * 1024 + 1)}, (413, "model_patch")),
    "patch of 50 megabytes": ({"model_patch": "x" * 50_000_000}, (413, "model_patch")),
    "oversized test patch": ({"test_patch": "x" * (16 * 1024 * 1024 + 1)}, (413, "test_patch")),
}


def started(judge: Any) -> tuple[int, int, list[str]]:
    """Trees judged and tasks held, and the runs so far by path."""
    with httpx.Client(base_url=judge.server.url, trust_env=False) as http:
        state, metrics = http.get("/readyz").json(), http.get("/metrics").text
    runs = [line for line in metrics.splitlines() if line.startswith("dockyard_sandbox_runs{")]
    return state["num_executions"], state["num_held"], runs


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_task_is_refused_by_field(name: str, project: Any, judge: Any, body: Any) -> None:
    change, expected = BAD[name]
    assert isinstance(change, dict)
    before = started(judge)
    assert refusal(judge.post({**body(project.task(), ""), **change})) == expected
    assert started(judge) == before


@pytest.mark.parametrize("field", ["instance_id", "repo", "base_commit", "FAIL_TO_PASS"])
def test_a_task_without_a_required_field_is_refused(field: str, project: Any, judge: Any, body: Any) -> None:
    task = body(project.task(), "")
    less = {name: value for name, value in task.items() if name != field}
    before = started(judge)
    assert refusal(judge.post(less)) == (422, field)
    assert refusal(judge.post({"tasks": [task, less]})) == (422, f"tasks.1.{field}")
    assert started(judge) == before


BAD_BATCHES = {
    "no task": (lambda task: {"tasks": []}, "tasks"),
    "object for a list": (lambda task: {"tasks": task}, "tasks"),
    "null for a list": (lambda task: {"tasks": None}, "tasks"),
    "too many tasks": (lambda task: {"tasks": [task] * 1025}, "tasks"),
    "number for a task": (lambda task: {"tasks": [task, 1]}, "tasks.1"),
    "unknown field beside tasks": (lambda task: {"tasks": [task], "deadline_s": 5}, "deadline_s"),
    "field of a task beside tasks": (lambda task: {"tasks": [task], "timeout_s": 5}, "timeout_s"),
    "unknown field of a task": (lambda task: {"tasks": [{**task, "gpus": 1}]}, "tasks.0.gpus"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_malformed_batch_is_refused_by_field(name: str, project: Any, judge: Any, body: Any) -> None:
    make, field = BAD_BATCHES[name]
    before = started(judge)
    assert refusal(judge.post(make(body(project.task(), "")))) == (422, field)
    assert started(judge) == before


BAD_NAMES = {
    ("/repos", "no name"): ({"repos": {}}, "repos"),
    ("/repos", "nothing"): ({}, "repos"),
    ("/repos", "list for a map"): ({"repos": ["/srv/calc"]}, "repos"),
    ("/repos", "number for a source"): ({"repos": {"bad": 1}}, "repos.bad"),
    ("/repos", "null for a source"): ({"repos": {"bad": None}}, "repos.bad"),
    ("/repos", "empty source"): ({"repos": {"bad": ""}}, "repos"),
    ("/repos", "relative source"): ({"repos": {"bad": "nowhere/at/all"}}, "repos"),
    ("/repos", "source of another protocol"): ({"repos": {"bad": "ext::sh -c true"}}, "repos"),
    ("/repos", "source that is not there"): ({"repos": {"bad": "/nowhere/at/all"}}, "repos"),
    ("/repos", "name that is a path"): ({"repos": {"../bad": "/"}}, "repos.../bad.[key]"),
    ("/repos", "unknown field"): ({"repos": {"bad": "/"}, "branch": "main"}, "branch"),
    ("/environments", "no name"): ({"environments": {}}, "environments"),
    ("/environments", "nothing"): ({}, "environments"),
    ("/environments", "list for a map"): ({"environments": []}, "environments"),
    ("/environments", "number for a source"): ({"environments": {"bad": 1}}, "environments.bad"),
    ("/environments", "relative source"): ({"environments": {"bad": "image.tar"}}, "environments.bad"),
    ("/environments", "source that is not there"): ({"environments": {"bad": "/nowhere"}}, "environments.bad"),
    ("/environments", "source that is no image"): ({"environments": {"bad": __file__}}, "environments.bad"),
    ("/environments", "name that is a path"): ({"environments": {"../bad": "/"}}, "environments.../bad.[key]"),
    ("/environments", "unknown field"): ({"environments": {"bad": "/"}, "python": "3"}, "python"),
}


@pytest.mark.parametrize(("path", "name"), BAD_NAMES)
def test_a_malformed_registration_is_refused_by_field(
    path: str, name: str, project: Any, judge: Any, body: Any
) -> None:
    content, field = BAD_NAMES[path, name]
    before = started(judge)
    reply = httpx.put(judge.server.url + path, json=content, timeout=60.0, trust_env=False)
    assert refusal(reply) == (422, field)
    for named in ({"repo": "bad"}, {"environment": "bad"}):
        assert refusal(judge.post({**body(project.task(), ""), **named})) == (422, next(iter(named)))
    assert started(judge) == before


def test_names_are_registered_together_or_not_at_all(project: Any, judge: Any, body: Any) -> None:
    both = {"good": str(project.path), "bad": "nowhere/at/all"}
    assert refusal(judge.post({"repos": both}, path="/repos")) == (422, "repos")
    assert refusal(judge.post(body(project.task(repo="good"), ""))) == (422, "repo")


def test_an_id_that_no_test_has_is_missing_and_not_an_error(project: Any, judge: Any, body: Any) -> None:
    task = {**body(project.task(), project.gold()), "FAIL_TO_PASS": ["tests/test_add.py::test_nowhere"]}
    reply = judge.post(task).json()
    assert reply["status"] == "unresolved"
    assert reply["tests"]["tests/test_add.py::test_nowhere"] == "missing"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tasks": 1', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(content: bytes, judge: Any) -> None:
    before = started(judge)
    assert refusal(judge.post(content)) == (400, "")
    assert started(judge) == before


@pytest.mark.parametrize(
    ("query", "field"),
    [("wiat=false", "wiat"), ("wait=maybe", "wait"), ("wait=true&wait=false", "wait"), ("deadline_s=0", "deadline_s")],
)
def test_a_query_that_would_be_ignored_is_refused(query: str, field: str, project: Any, judge: Any, body: Any) -> None:
    reply = judge.post(body(project.task(), ""), path=f"/task/submit?{query}")
    assert refusal(reply) == (422, field)


@pytest.mark.parametrize(("method", "path", "code"), [("GET", "/tasks", 404), ("GET", "/task/submit/x", 404)])
def test_a_route_that_is_not_there_is_an_error_in_json(method: str, path: str, code: int, judge: Any) -> None:
    reply = httpx.request(method, judge.server.url + path, trust_env=False)
    assert refusal(reply) == (code, "")


def test_a_batch_answers_in_order(project: Any, judge: Any, body: Any) -> None:
    patches = [project.gold(), "", "garbage", project.gold()]
    tasks = [body(project.task(), patch) for patch in patches]
    replies = judge.post({"tasks": tasks}).json()["tasks"]
    assert [reply["status"] for reply in replies] == ["resolved", "unresolved", "apply_failed", "resolved"]


def test_a_batch_names_the_task_that_is_wrong(project: Any, judge: Any, body: Any) -> None:
    task = body(project.task(), "")
    assert refusal(judge.post({"tasks": [task, {**task, "timeout_s": -1}]})) == (422, "tasks.1.timeout_s")
    assert refusal(judge.post({"tasks": [task, {**task, "repo": "nowhere"}]})) == (422, "tasks.1.repo")


def test_an_idempotency_key_is_bound_to_its_body(project: Any, judge: Any, body: Any) -> None:
    key = uuid.uuid4().hex
    task = body(project.task(), project.gold())
    first = judge.post(task, Idempotency_Key=key).json()
    again = judge.post(task, Idempotency_Key=key).json()
    assert again["task_id"] == first["task_id"]
    other = judge.post({**task, "model_patch": ""}, Idempotency_Key=key)
    assert refusal(other) == (409, "Idempotency-Key")


def test_a_group_of_identical_patches_runs_once(project: Any, judge: Any) -> None:
    patch = project.gold().replace("a + b", f"a + b  # {uuid.uuid4().hex}")
    before = started(judge)[0]
    verdicts = judge.all(project.task(), [patch] * 16)
    assert started(judge)[0] == before + 1
    assert {verdict.status for verdict in verdicts} == {"resolved"}
    assert sorted(verdict.cached for verdict in verdicts) == [False] + [True] * 15
    assert judge(project.task(), patch).cached
    assert started(judge)[0] == before + 1


def test_another_diff_of_the_same_tree_is_not_run_again(project: Any, judge: Any) -> None:
    marker = uuid.uuid4().hex
    patch = project.gold().replace("a + b", f"a + b  # {marker}")
    same_tree = "A sentence before the diff.\n" + patch
    assert not judge(project.task(), patch).cached
    before = started(judge)[0]
    verdict = judge(project.task(), same_tree)
    assert verdict.cached
    assert verdict.is_resolved
    assert started(judge)[0] == before


def test_another_timeout_is_another_spec(project: Any, judge: Any) -> None:
    patch = project.gold().replace("a + b", f"a + b  # {uuid.uuid4().hex}")
    assert not judge(project.task(), patch).cached
    assert not judge(project.task(timeout_s=31.0), patch).cached


def test_a_registered_name_stands_for_its_source(project: Any, judge: Any, body: Any) -> None:
    assert judge.post({"repos": {"calc/named": str(project.path)}}, path="/repos").status_code == 200
    assert judge.post(body(project.task(repo="calc/named"), project.gold())).json()["status"] == "resolved"
    assert refusal(judge.post({"repos": {"x": "nowhere/at/all"}}, path="/repos")) == (422, "repos")


def test_a_name_registered_anew_means_the_new_source(
    project: Any, new_project: Any, judge: Any, body: Any, tmp_path: Path
) -> None:
    other = new_project(tmp_path / "other", {"calc/ops.py": "def add(a, b):\n    return a + b\n"})
    task = body(project.task(repo="calc/moved"), "")
    assert judge.post({"repos": {"calc/moved": str(project.path)}}, path="/repos").status_code == 200
    assert judge.post(task).json()["status"] == "unresolved"
    assert judge.post({"repos": {"calc/moved": str(other.path)}}, path="/repos").status_code == 200
    assert refusal(judge.post(task)) == (422, "base_commit")


def test_a_token_guards_everything_but_health(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse battery staple\n")
    handle = start_server(tmp_path / "root", token_file=token)
    try:
        with httpx.Client(base_url=handle.url, trust_env=False) as http:
            good = {"Authorization": "Bearer correct horse battery staple"}
            assert http.get("/healthz").status_code == 200
            assert http.get("/version").status_code == 401
            assert http.get("/version", headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert http.get("/version", headers=good).json()["name"] == "dockyard-sandbox"
            assert http.get("/readyz", headers=good).json()["isolation"] == handle.isolation
    finally:
        assert handle.stop() == 0


def test_a_defect_of_ours_is_an_answer_in_json() -> None:
    async def run() -> httpx.Response:
        broken: Any = type("Broken", (), {"sessions": None, "admission": None, "bodies": None})()
        transport = httpx.ASGITransport(Api(broken, None).application(None), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.get("/readyz")

    reply = asyncio.run(run())
    assert (reply.status_code, reply.json()["error"]["field"]) == (500, "")
    assert "AttributeError" in reply.json()["error"]["message"]
