"""Tasks that nobody waits for: accepted, polled, cancelled, remembered over the server's death."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import ServerHandle, start_server

SLEEP = {"calc/ops.py": "import time\n\ntime.sleep(120)\n"}


@pytest.fixture
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120.0, trust_env=False) as client:
        yield client


def wait_for(http: httpx.Client, task_id: str) -> dict[str, Any]:
    for _ in range(10):
        reply = http.get(f"/task/{task_id}", params={"wait_s": 20})
        if reply.status_code == 200:
            found: dict[str, Any] = reply.json()
            return found
        assert reply.status_code == 202
    raise AssertionError(f"{task_id} has no verdict")


def unique(patch: str) -> str:
    return f"{uuid.uuid4().hex}\n{patch}"


def test_an_accepted_task_is_polled_to_its_verdict(project: Any, body: Any, http: httpx.Client) -> None:
    reply = http.post("/task/submit?wait=false", json=body(project.task(), unique(project.gold())))
    assert reply.status_code == 202
    task_id = reply.json()["task_id"]
    verdict = wait_for(http, task_id)
    assert (verdict["status"], verdict["task_id"]) == ("resolved", task_id)
    assert http.get(f"/task/{task_id}").json() == verdict


def test_each_task_of_an_accepted_batch_has_an_id(project: Any, body: Any, http: httpx.Client) -> None:
    tasks = [body(project.task(), patch) for patch in (unique(project.gold()), "garbage", "")]
    reply = http.post("/task/submit?wait=false", json={"tasks": tasks})
    ids = [task["task_id"] for task in reply.json()["tasks"]]
    assert (reply.status_code, len(set(ids))) == (202, 3)
    assert [wait_for(http, one)["status"] for one in ids] == ["resolved", "apply_failed", "unresolved"]
    assert http.get(f"/task/{ids[0][:-1]}3").status_code == 404
    assert http.get(f"/task/{ids[0].split('-')[0]}").status_code == 404


def test_a_cancelled_task_ends_and_is_not_scored(project: Any, body: Any, http: httpx.Client) -> None:
    task = body(project.task(timeout_s=100.0), unique(project.patch(SLEEP)))
    task_id = http.post("/task/submit?wait=false", json=task).json()["task_id"]
    began = time.monotonic()
    assert http.delete(f"/task/{task_id}").status_code == 200
    verdict = wait_for(http, task_id)
    assert time.monotonic() - began < 60
    assert (verdict["status"], verdict["retryable"], verdict["detail"]) == (
        "infra_error",
        False,
        "the task was cancelled",
    )
    assert http.delete(f"/task/{task_id}").status_code == 200  # asking again changes nothing
    assert http.get(f"/task/{task_id}").json() == verdict


@pytest.mark.parametrize("task_id", ["nope", "0" * 32, "0" * 32 + "-1", "-", "a-b", "x" * 500])
def test_an_unknown_task_is_404(task_id: str, http: httpx.Client) -> None:
    assert http.get(f"/task/{task_id}").status_code == 404
    assert http.delete(f"/task/{task_id}").status_code == 404


def test_a_key_that_is_sent_again_gets_the_same_task(project: Any, body: Any, http: httpx.Client) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    task = body(project.task(), unique(project.gold()))
    first = http.post("/task/submit?wait=false", json=task, headers=key).json()["task_id"]
    assert http.post("/task/submit?wait=false", json=task, headers=key).json()["task_id"] == first
    assert http.post("/task/submit", json=task, headers=key).json()["task_id"] == first
    other = http.post("/task/submit?wait=false", json={**task, "model_patch": ""}, headers=key)
    assert (other.status_code, other.json()["error"]["field"]) == (409, "Idempotency-Key")


@pytest.mark.parametrize("key", ["", "x" * 1025])
def test_a_key_has_a_length(key: str, project: Any, body: Any, http: httpx.Client) -> None:
    reply = http.post("/task/submit", json=body(project.task(), ""), headers={"Idempotency-Key": key})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "Idempotency-Key")


def test_a_deadline_stops_the_work_and_is_not_scored(project: Any, body: Any, http: httpx.Client) -> None:
    task = body(project.task(timeout_s=100.0), unique(project.patch(SLEEP)))
    reply = http.post("/task/submit?deadline_s=2", json=task)
    verdict = reply.json()
    assert (reply.status_code, verdict["status"], verdict["retryable"]) == (200, "infra_error", True)
    assert "deadline_s=2" in verdict["detail"]


def test_what_was_answered_before_a_kill_is_answered_after_it(project: Any, body: Any, tmp_path: Path) -> None:
    root, key = tmp_path / "root", {"Idempotency-Key": "attempt-1"}
    task = body(project.task(), project.gold())
    handle = start_server(root)
    first = httpx.post(f"{handle.url}/task/submit", json=task, headers=key, timeout=60.0, trust_env=False).json()
    os.kill(handle.pid, signal.SIGKILL)
    handle.stop()
    again = start_server(root)
    try:
        with httpx.Client(base_url=again.url, timeout=60.0, trust_env=False) as http:
            assert http.get(f"/task/{first['task_id']}").json() == first
            assert http.post("/task/submit", json=task, headers=key).json() == first
            assert http.get("/readyz").json()["num_executions"] == 0
    finally:
        assert again.stop() == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_accepted_before_the_end_is_an_infra_error_after_it(
    how: int, project: Any, body: Any, tmp_path: Path
) -> None:
    root, key = tmp_path / "root", {"Idempotency-Key": "attempt-1"}
    task = body(project.task(timeout_s=100.0), project.patch(SLEEP))
    handle = start_server(root)
    with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
        accepted = http.post("/task/submit?wait=false", json=task, headers=key).json()
    os.kill(handle.pid, how)
    handle.stop()
    again = start_server(root)
    try:
        with httpx.Client(base_url=again.url, timeout=60.0, trust_env=False) as http:
            verdict = http.get(f"/task/{accepted['task_id']}").json()
            assert (verdict["status"], verdict["retryable"]) == ("infra_error", True)
            assert set(verdict["tests"].values()) == {"missing"}
            assert http.post("/task/submit", json=task, headers=key).json() == verdict
            assert http.get("/readyz").json()["num_executions"] == 0
    finally:
        assert again.stop() == 0
    assert [path.name for path in (root / "tasks").iterdir()] == [f"{accepted['task_id']}.json"]


@pytest.mark.ci
def test_slow_clones_hold_up_nobody_else(project: Any, body: Any, tmp_path: Path) -> None:
    """Repositories behind servers that accept and never answer: the tasks of others go on."""
    handle = start_server(tmp_path / "root")
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(12)]
    task = body(project.task(), project.gold())
    try:
        with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:

            def stuck(listener: socket.socket) -> None:
                url = f"https://127.0.0.1:{listener.getsockname()[1]}/x.git"
                with pytest.raises(httpx.TransportError):
                    httpx.post(f"{handle.url}/task/submit", json={**task, "repo": url}, timeout=8, trust_env=False)

            waiting = [pool.submit(stuck, listener) for listener in silent]
            time.sleep(1)
            for index in range(3):
                headers = {"Idempotency-Key": f"k{index}"}
                reply = http.post("/task/submit", json=task, headers=headers)
                assert reply.json()["status"] == "resolved"
            for future in waiting:
                future.result()
    finally:
        assert handle.stop(timeout_s=60.0) == 0
        for listener in silent:
            listener.close()


def test_a_client_that_leaves_frees_its_key(project: Any, body: Any, server: ServerHandle) -> None:
    """Nobody is owed an answer then: the same attempt may be made again."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    task = body(project.task(timeout_s=2.0), unique(project.patch(SLEEP)))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/task/submit", json=task, headers=headers, timeout=1.0, trust_env=False)
    reply = httpx.post(f"{server.url}/task/submit", json=task, headers=headers, timeout=60.0, trust_env=False)
    assert reply.json()["status"] == "timeout"
