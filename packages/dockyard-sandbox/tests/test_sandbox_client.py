"""What the client asks again, and what it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from dockyard_core import SandboxError, SandboxTimeout, SandboxUnavailable, Task, Verdict, VerdictStatus
from dockyard_sandbox import SandboxClient
from dockyard_sandbox.client import request_body
from dockyard_sandbox.wire import MAX_PATCH_BYTES, TaskRequest

TASK = Task(
    instance_id="x",
    repo="r",
    base_commit="0" * 40,
    problem_statement="",
    test_patch="",
    fail_to_pass=("t.py::a",),
    apply="strict",
)


def reply(status: str, *, retryable: bool = False) -> dict[str, Any]:
    return {
        "task_id": "t",
        "status": status,
        "resolved": status == "resolved",
        "pass_rate": float(status == "resolved"),
        "fail_to_pass": {"passed": int(status == "resolved"), "total": 1},
        "pass_to_pass": {"passed": 0, "total": 0},
        "tests": {"t.py::a": "passed" if status == "resolved" else "missing"},
        "flags": [],
        "isolation": "namespaces",
        "duration_s": {},
        "log": "",
        "evidence": "sha256:0",
        "retryable": retryable,
        "cached": False,
        "detail": "",
    }


OK = httpx.Response(200, json=reply("resolved"))
INFRA = httpx.Response(200, json=reply("infra_error", retryable=True))
BUSY = httpx.Response(429, json={"error": {"field": "", "message": "full"}}, headers={"Retry-After": "0"})


def ask(*answers: httpx.Response | Exception, patch: str = "", **options: Any) -> tuple[Verdict, list[httpx.Request]]:
    """Judge against a server that gives ``answers`` in order, the last one for ever."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = answers[min(len(seen), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    async def judge() -> Verdict:
        transport = httpx.MockTransport(handler)
        async with SandboxClient("http://sandbox", transport=transport, **options) as client:
            return await client.judge(TASK, patch, attempt_id="rollout-1/0")

    return asyncio.run(judge()), seen


@pytest.mark.parametrize("trouble", [BUSY, httpx.ConnectError("refused"), httpx.RemoteProtocolError("cut")])
def test_a_request_that_got_no_answer_is_asked_again_under_the_same_key(trouble: httpx.Response | Exception) -> None:
    verdict, seen = ask(trouble, trouble, OK)
    assert verdict.is_resolved
    assert [request.headers["Idempotency-Key"] for request in seen] == ["rollout-1/0"] * 3
    assert len({request.content for request in seen}) == 1


def test_an_infra_error_is_an_answer_and_asking_again_is_another_attempt() -> None:
    verdict, seen = ask(INFRA, BUSY, INFRA, OK)
    assert verdict.is_resolved
    keys = [request.headers["Idempotency-Key"] for request in seen]
    assert keys == ["rollout-1/0", "rollout-1/0/retry-1", "rollout-1/0/retry-1", "rollout-1/0/retry-3"]
    assert len({request.content for request in seen}) == 1


@pytest.mark.parametrize("status", [status for status in VerdictStatus if status is not VerdictStatus.INFRA_ERROR])
def test_a_verdict_on_the_policy_is_final(status: VerdictStatus) -> None:
    verdict, seen = ask(httpx.Response(200, json=reply(str(status))))
    assert (verdict.status, len(seen)) == (status, 1)


def test_an_infra_error_that_cannot_heal_is_final() -> None:
    verdict, seen = ask(httpx.Response(200, json=reply("infra_error", retryable=False)))
    assert (verdict.status, len(seen)) == (VerdictStatus.INFRA_ERROR, 1)


def test_lasting_infra_errors_end_as_a_verdict_that_is_not_scored() -> None:
    verdict, seen = ask(INFRA, max_retries=1)
    assert (verdict.status, verdict.status.is_scorable, len(seen)) == (VerdictStatus.INFRA_ERROR, False, 2)


@pytest.mark.parametrize("trouble", [BUSY, httpx.ConnectError("refused")])
def test_a_server_that_stays_away_is_unavailable(trouble: httpx.Response | Exception) -> None:
    with pytest.raises(SandboxUnavailable, match="2 tries"):
        ask(trouble, max_retries=1)


@pytest.mark.parametrize("code", [401, 500, 503])
def test_a_refusing_server_is_unavailable_at_once(code: int) -> None:
    with pytest.raises(SandboxUnavailable, match=str(code)):
        ask(httpx.Response(code, json={"error": {"field": "", "message": "no"}}))


def test_a_malformed_task_is_an_error_that_names_the_field() -> None:
    with pytest.raises(SandboxError, match="base_commit: bad"):
        ask(httpx.Response(422, json={"error": {"field": "base_commit", "message": "bad"}}))


def test_an_oversized_patch_is_the_policys_doing() -> None:
    too_large = httpx.Response(413, json={"error": {"field": "model_patch", "message": "too large"}})
    verdict, _ = ask(too_large, patch="x" * (MAX_PATCH_BYTES + 1))
    assert verdict.status is VerdictStatus.POLICY_VIOLATION
    assert verdict.status.is_scorable


@pytest.mark.parametrize("field", ["test_patch", ""])
def test_anything_else_that_is_too_large_is_the_tasks_defect(field: str) -> None:
    with pytest.raises(SandboxError, match="413"):
        ask(httpx.Response(413, json={"error": {"field": field, "message": "too large"}}))


def test_the_deadline_covers_the_retries() -> None:
    with pytest.raises(SandboxTimeout, match=r"0\.5 s"):
        ask(INFRA, timeout_s=0.5)


@pytest.mark.parametrize(("patch", "sent"), [("x\ud800y", "x\ufffdy"), ("naïve 🙂\r\n\x00", "naïve 🙂\r\n\x00")])
def test_any_text_can_be_sent(patch: str, sent: str) -> None:
    request = TaskRequest.model_validate(request_body(TASK, patch))
    assert request.model_patch == sent


def test_what_the_client_sends_is_what_the_server_accepts() -> None:
    request = TaskRequest.model_validate(request_body(TASK, "p"))
    assert (request.deciding_ids, request.model_patch, request.timeout_s) == (TASK.fail_to_pass, "p", TASK.timeout_s)
