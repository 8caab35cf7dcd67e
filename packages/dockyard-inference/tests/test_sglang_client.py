"""The SGLang engine and a server that refuses, lies, is late or goes away. The stub is not SGLang: the real one
is in test_sglang_generator.py."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard_core.errors import EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.generator import GenerateRequest, SamplingParams
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_core.testing.generator_checks import request, until_running
from dockyard_inference import RefitSender, SglangConfig, SglangGenerator
from dockyard_inference.sglang_engine.client import NoAnswer, SglangClient

OK = {"success": True, "message": "Success"}


class Stub(ThreadingHTTPServer):
    """Answers by path; a body that is a callable is called with the request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[tuple[str, Any]] = []
        self.label = "default"
        self.released = threading.Event()
        self.aborted = threading.Event()
        self.answers: dict[str, Any] = {
            "/model_info": lambda _: (200, {"weight_version": self.label}),
            "/server_info": (200, {}),
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": (200, {"status": "ok"}),
            "/continue_generation": (200, {"status": "ok"}),
            "/update_weight_version": self.relabel,
            "/update_weights_from_disk": self.update,
        }

    def generate(self, body: Any) -> tuple[int, Any]:
        """Three tokens; a rollout that may be longer waits until it is aborted."""
        is_long = body["sampling_params"]["max_new_tokens"] > 3
        if is_long:
            self.aborted.wait(60)
        ids = [7, 8, 9][: body["sampling_params"]["max_new_tokens"]]
        meta = {
            "finish_reason": {"type": "abort" if is_long else "length"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "input_token_logprobs": [[None, 0, None]] + [[-1.0, token, None] for token in body["input_ids"][1:]],
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        return 200, {"output_ids": ids, "meta_info": meta}

    def abort(self, body: Any) -> tuple[int, str]:
        self.aborted.set()
        return 200, ""

    def relabel(self, body: Any) -> tuple[int, Any]:
        self.label = body["new_version"]
        return 200, OK

    def update(self, body: Any) -> tuple[int, Any]:
        assert [path.suffix for path in Path(body["model_path"]).iterdir()] == [".safetensors"]
        self.label = body["weight_version"]
        return 200, OK

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body in self.seen if seen == path]


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.server.seen.append((self.path, body))
        answer = self.server.answers[self.path]
        code, said = answer(body) if callable(answer) else answer
        if code == 0:  # as a process that dies
            self.connection.close()
            self.close_connection = True
            return
        text = (said if isinstance(said, str) else json.dumps(said)).encode()
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            self.close_connection = True  # the client went away

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.aborted.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": {"message": "too long"}}), "refused /x with 400: too long"),
        ((400, {"error": "unknown field `a`"}), "refused /x with 400: unknown field `a`"),
        ((400, {"success": False, "message": "no\ngroup"}), "refused /x with 400: no group"),
        ((401, "Unauthorized"), "refused /x with 401: Unauthorized"),
        ((200, {"success": False, "message": "partially updated"}), "refused /x: partially updated"),
        ((200, "<html>"), "with what is no JSON: '<html>'"),
        ((200, [1]), "answered /x with a list"),
    ],
)
def test_a_refusal_or_nonsense_is_one_error_with_the_servers_words(stub: Stub, answer: Any, message: str) -> None:
    async def work() -> None:
        client = SglangClient(stub.url)
        stub.answers["/x"] = answer
        with pytest.raises(GeneratorError) as caught:
            await client.tell("/x", {}, 30.0)
        await client.close()
        assert message in str(caught.value)
        assert not isinstance(caught.value, EngineDead)

    asyncio.run(work())


def test_a_late_answer_and_a_dead_server_are_told_apart(stub: Stub) -> None:
    async def work() -> None:
        client = SglangClient(stub.url, why_dead=lambda: "its last lines: IndexError")
        stub.answers["/late"] = lambda _: (200, {"late": stub.released.wait(60)})
        stub.answers["/dead"] = (0, "")
        with pytest.raises(NoAnswer, match=r"did not answer /late within 0\.2 s"):
            await client.ask("/late", 0.2)
        with pytest.raises(EngineDead, match=r"is gone \(RemoteProtocolError.*its last lines: IndexError"):
            await client.tell("/dead", {}, 30.0)
        await client.close()
        nobody = SglangClient("http://127.0.0.1:1")
        with pytest.raises(EngineDead, match=r"is gone \(ConnectError"):
            await nobody.generate({}, lambda: "r#")
        await nobody.close()

    asyncio.run(work())


def test_a_connection_that_breaks_while_the_server_lives_is_tried_again(stub: Stub) -> None:
    async def work() -> None:
        client = SglangClient(stub.url)
        rids = iter(("a#", "b#", "c#", "d#"))
        codes = iter((0, 0, 200))
        stub.answers["/generate"] = lambda body: (next(codes), {"rid": body["rid"]})
        assert await client.generate({}, rids.__next__) == {"rid": "c#"}
        stub.answers["/x"] = lambda _: (next(codes), OK)
        codes = iter((0, 200))
        assert await client.tell("/x", {}, 30.0) == OK
        stub.answers["/generate"] = (0, "")
        with pytest.raises(EngineDead, match="is gone"):
            await client.generate({}, lambda: "e#")
        await client.close()

    asyncio.run(work())


Use = Callable[[SglangGenerator], Coroutine[Any, Any, None]]


@pytest.fixture
def engine(stub: Stub, make_model: Callable[..., Path], tmp_path: Path) -> Callable[[Use], None]:
    """Runs a coroutine with an engine of the stub."""
    config = SglangConfig(
        model=str(make_model("qwen2", is_tied=True)),
        url=stub.url,
        weights_directory=tmp_path / "weights",
        max_model_len=16,
        answer_timeout_s=1.0,
    )

    def use(work: Use) -> None:
        async def run() -> None:
            generator = SglangGenerator(config)
            await generator.start()
            try:
                await work(generator)
            finally:
                await generator.shutdown()

        asyncio.run(run())

    return use


def test_what_the_server_would_not_survive_is_never_sent(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        sent = len(stub.bodies("/generate"))
        for prompt in ((), (61,), (-1,), (3,) * 16):
            with pytest.raises(GeneratorError):
                await generator.generate(request("odd", prompt))
        for tokens in ((3, 61), (3,) * 17):
            with pytest.raises(GeneratorError):
                await generator.score(tokens)
        seeded = GenerateRequest(request_id="s", prompt_token_ids=(3,), sampling=SamplingParams(seed=1))
        with pytest.raises(GeneratorError, match="would ignore a request's seed"):
            await generator.generate(seeded)
        assert await generator.score((3,)) == ()
        assert len(stub.bodies("/generate")) == sent
        assert await generator.score((3, 4)) == (-1.0,)

    engine(work)


def test_requests_are_named_so_that_none_is_the_head_of_another(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        await asyncio.gather(*(generator.generate(request(f"{i}", (3,), max_new_tokens=2)) for i in range(12)))
        rids = [body["rid"] for body in stub.bodies("/generate")]
        assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]

    engine(work)


def test_an_abort_names_only_its_own_requests_and_returns_what_there_is(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        task = asyncio.create_task(generator.generate(request("long", (3,), max_new_tokens=9)))
        await until_running(generator, 1)
        await generator.pause("abort")
        completion = await task
        assert (completion.token_ids, completion.finish_reason) == ((7, 8, 9), "abort")
        [rid] = {body["rid"] for body in stub.bodies("/abort_request")}
        assert rid == stub.bodies("/generate")[-1]["rid"]
        assert not any(body["abort_all"] for body in stub.bodies("/abort_request"))

    engine(work)


def test_a_cancelled_request_is_aborted_at_the_server(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        task = asyncio.create_task(generator.generate(request("long", (3,), max_new_tokens=9)))
        await until_running(generator, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(stub.aborted.wait, 60)
        assert (await generator.health()).num_running == 0

    engine(work)


def test_a_server_that_does_not_answer_or_is_gone_is_not_healthy(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        assert (await generator.health()).is_alive
        generator._session.client.heard_at = 0.0  # type: ignore[union-attr]
        stub.answers["/server_info"] = lambda _: (200, {"late": stub.released.wait(60)})
        started = time.monotonic()
        health = await generator.health()
        assert time.monotonic() - started < 30
        assert not health.is_alive
        assert "did not answer /server_info within 1 s" in health.detail
        stub.answers["/server_info"] = (0, "")
        assert "is gone" in (await generator.health()).detail

    engine(work)


def test_no_server_at_an_address_is_said_at_once(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    config = SglangConfig(
        model=str(make_model("qwen2", is_tied=True)), url="http://127.0.0.1:1", weights_directory=tmp_path
    )
    with pytest.raises(GeneratorError, match=r"no SGLang server serves at http://127\.0\.0\.1:1: .*ConnectError"):
        asyncio.run(SglangGenerator(config).start())
    assert list(tmp_path.iterdir()) == []


async def _refit(generator: SglangGenerator, timeout_s: float = 60.0) -> list[Any]:
    held = generator._session.facts.held  # type: ignore[union-attr]
    manifest = tuple(TensorSpec(name, "float32", shape) for name, shape in held.items())
    update = RefitUpdate(policy_version=generator.version + 1, manifest=manifest, timeout_s=timeout_s)

    def stream(sink: WeightSink) -> None:
        for name, shape in held.items():
            sink(WeightChunk(name, shape, (0,) * len(shape), torch.ones(shape)))

    sender = RefitSender("127.0.0.1", 0, 2, transport="collective")
    try:
        await asyncio.gather(asyncio.to_thread(sender.connect), generator.connect_refit(sender.endpoint()))
        sending = asyncio.to_thread(sender.send, stream, update)
        return await asyncio.gather(generator.refit(update), sending, return_exceptions=True)
    finally:
        sender.close()


@pytest.mark.parametrize(
    ("path", "answer", "kind", "message"),
    [
        (
            "/update_weights_from_disk",
            (400, {"success": False, "message": "partially updated"}),
            RefitError,
            "partially",
        ),
        ("/update_weights_from_disk", (0, ""), EngineDead, "is gone"),
        ("/update_weights_from_disk", (200, OK), RefitError, "took 0:1 and says that it holds 0:0"),
        ("/pause_generation", "late", RefitTimeout, "did not answer /pause_generation within 1 s"),
        ("/continue_generation", "late", RefitTimeout, "did not answer /continue_generation within 1 s"),
    ],
)
def test_a_load_that_fails_fences_the_engine_and_the_next_one_heals_it(
    stub: Stub, engine: Any, tmp_path: Path, path: str, answer: Any, kind: type[Exception], message: str
) -> None:
    async def work(generator: SglangGenerator) -> None:
        good = stub.answers[path]
        stub.answers[path] = (lambda _: (200, {"late": stub.released.wait(60)})) if answer == "late" else answer
        failed, sent = await _refit(generator)
        assert isinstance(failed, kind), failed
        assert message in str(failed)
        if path != "/continue_generation":  # by then the load was attested
            assert isinstance(sent, RefitError)
            assert generator.version == 0
        with pytest.raises(GeneratorError, match="the engine is fenced"):
            await generator.generate(request("fenced", (3,)))
        assert list((tmp_path / "weights").glob("*/*")) == []
        stub.answers[path] = good
        report, _ = await _refit(generator)
        assert report.policy_version == generator.version
        completion = await generator.generate(request("healed", (3,), max_new_tokens=2))
        assert {span.policy_version for span in completion.version_spans} == {generator.version}

    engine(work)
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_server_is_left_running_with_what_it_holds(stub: Stub, engine: Any) -> None:
    async def work(generator: SglangGenerator) -> None:
        await generator.pause()

    engine(work)
    assert [path for path, _ in stub.seen if "_generation" in path][-1] == "/continue_generation"
    assert stub.label == "0:0"
