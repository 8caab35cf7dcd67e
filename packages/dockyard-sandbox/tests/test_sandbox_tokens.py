"""Tokens and tenants: what a file may hold, and whom a request speaks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import UserError
from dockyard_sandbox import start_server
from dockyard_sandbox.tokens import read_tokens, tenant_name


def test_one_token_leaves_the_tenant_to_the_request(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("team:with:colons and spaces\n")
    tokens = read_tokens(tmp_path / "t")
    assert tokens.tenant_of("Bearer team:with:colons and spaces", "x") == "x"
    assert tokens.tenant_of("Bearer team:with:colons and space", "x") is None
    assert tokens.tenant_of("", "x") is None


def test_several_tokens_name_their_tenants(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(f"red:{'r' * 16}\n\nblue:{'b' * 16}\n")
    tokens = read_tokens(tmp_path / "t")
    assert tokens.tenant_of(f"Bearer {'r' * 16}", "blue") == "red"
    assert tokens.tenant_of(f"Bearer {'b' * 16}", "red") == "blue"


@pytest.mark.parametrize("content", ["", "short", f"a:{'x' * 16}\nb:short", f"{'x' * 16}\n{'y' * 16}", "\udcff" * 20])
def test_a_token_file_that_guards_nothing_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match="--token-file"):
        read_tokens(tmp_path / "t")


@pytest.mark.parametrize(("header", "name"), [(None, "default"), ("team-1", "team-1"), ("", None), ("a b", None)])
def test_a_tenant_has_a_plain_name(header: str | None, name: str | None) -> None:
    assert tenant_name(header) == name


def test_a_tenant_sees_its_own_tasks_only(project: Any, body: Any, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(f"red:{'r' * 16}\nblue:{'b' * 16}\n")
    handle = start_server(tmp_path / "root", token_file=tmp_path / "t")
    red, blue = ({"Authorization": f"Bearer {letter * 16}"} for letter in "rb")
    try:
        with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
            task = body(project.task(), project.gold())
            accepted = http.post("/task/submit?wait=false", json=task, headers=red).json()
            path = f"/task/{accepted['task_id']}"
            assert http.get(path, headers=blue).status_code == 404
            assert http.delete(path, headers=blue).status_code == 404
            assert http.get(f"{path}?wait_s=50", headers=red).json()["status"] == "resolved"
            keyed = {"Idempotency-Key": "same"}
            first = http.post("/task/submit", json=task, headers=red | keyed).json()
            other = http.post("/task/submit", json={**task, "model_patch": ""}, headers=blue | keyed).json()
            assert (first["status"], other["status"]) == ("resolved", "unresolved")
    finally:
        assert handle.stop() == 0
