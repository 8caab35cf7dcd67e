"""``dockyard-refit push`` without a real server: arguments, directories, and what it does to a server that records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard_inference.push.checkpoint_dir import read_checkpoint
from dockyard_inference.push.cli import main, next_version
from dockyard_inference.push.errors import CheckpointError, NamesDiffer
from dockyard_inference.push.names import check_against_parameters, parameter_names

safetensors = pytest.importorskip("safetensors.torch")
SGLANG: dict[str, Any] = {"/server_info": {"version": "0.5.23", "device": "cpu"}}
VLLM: dict[str, Any] = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"owned_by": "vllm"}]}}


class Recorder:
    """A server that answers what it is given and remembers what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.posts, self.bodies = answers, list[str](), dict[str, Any]()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(self.path.partition("?")[0])

            def do_POST(self) -> None:
                path = self.path.partition("?")[0]
                recorder.posts.append(path)
                recorder.bodies[path] = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                self._answer(path)

            def _answer(self, path: str) -> None:
                found = recorder.answers.get(path)
                found = found(recorder) if callable(found) else found
                status, body = found if isinstance(found, tuple) else (200 if found is not None else 404, found)
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                try:
                    self.wfile.write(payload)
                except BrokenPipeError:
                    pass  # the client gave up

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serving() -> Iterator[Callable[[dict[str, Any]], Recorder]]:
    made: list[Recorder] = []

    def serve(answers: dict[str, Any]) -> Recorder:
        made.append(Recorder(answers))
        return made[-1]

    yield serve
    for recorder in made:
        recorder.close()


def write(
    directory: Path, tensors: dict[str, torch.Tensor], *, tied: bool = True, file: str = "model.safetensors"
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": tied}))
    safetensors.save_file(tensors, directory / file)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"model.norm.weight": torch.arange(5.0), "model.embed_tokens.weight": torch.ones(3, 2).bfloat16()}
    return write(tmp_path / "pushed", tensors)


def sglang(model: Path, **answers: Any) -> dict[str, Any]:
    """A server with one model; a successful update changes the label."""
    label = {"weight_version": "default"}

    def update(recorder: Recorder) -> Any:
        label["weight_version"] = recorder.bodies["/update_weights_from_disk"]["weight_version"]
        return {"success": True}

    ok = {"status": "ok"}
    return {
        **SGLANG,
        "/model_info": lambda _: {"model_path": str(model), **label},
        "/pause_generation": ok,
        "/continue_generation": ok,
        "/update_weights_from_disk": update,
        **answers,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["push"], "DIR"),
        (["push", "x"], "--to"),
        (["push", "x", "--to", "localhost:8000"], "must be http://HOST:PORT"),
        (["push", "x", "--to", "http://h:99999999"], "must be http://HOST:PORT"),
        (["push", "x", "--to", "http://h", "--version", "-1"], "--version"),
        (["push", "x", "--to", "http://h", "--version", "new"], "must be an integer"),
        (["push", "x", "--to", "http://h", "--timeout", "0"], "must be seconds > 0"),
        (["push", "x", "--to", "http://h", "--timeout", "inf"], "must be seconds > 0"),
        (["push", "x", "--to", "http://h", "--transport", "pigeon"], "--transport"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_directory_that_is_no_checkpoint_says_what_it_lacks(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no \\*"):
        read_checkpoint(tmp_path)
    whole = (checkpoint / "model.safetensors").read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        (checkpoint / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cut short"):
            read_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(whole)
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks absent\.safetensors"):
        read_checkpoint(checkpoint)
    (checkpoint / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(CheckpointError, match="quantized"):
        read_checkpoint(checkpoint)


def test_tensors_are_those_of_the_files_and_a_tied_head_is_left_out(tmp_path: Path) -> None:
    first = {"a.weight": torch.randn(3, 4), "lm_head.weight": torch.ones(2)}
    second = {"b.bias": torch.randn(5).bfloat16(), "c": torch.tensor(2.5), "x.rotary_emb.inv_freq": torch.ones(2)}
    write(tmp_path / "hf", first, file="model-1.safetensors")
    write(tmp_path / "hf", second, file="model-2.safetensors")
    read = read_checkpoint(tmp_path)  # as in a checkpoint of ours
    assert read.path == tmp_path / "hf"
    found = {spec.name: tensor for spec, tensor in read.tensors()}
    assert found.keys() == {"a.weight", "b.bias", "c"}
    assert all(torch.equal(found[name], (first | second)[name]) for name in found)
    assert read.num_bytes == 48 + 10 + 4
    write(tmp_path / "hf", first, tied=False, file="model-1.safetensors")
    assert "lm_head.weight" in read_checkpoint(tmp_path).shapes


@pytest.mark.parametrize(("held", "version"), [("default", 1), ("7", 8), ("0:41", 42), ("step-9", 10)])
def test_the_next_version_follows_the_label(held: str, version: int) -> None:
    assert next_version(held) == version


def test_names_are_compared_as_the_servers_fuse_them(tmp_path: Path) -> None:
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    names = [f"model.layers.0.{name}.weight" for name in projections]
    read = read_checkpoint(write(tmp_path / "c", {name: torch.ones(1) for name in names}))
    served = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    told = {f"dp0:pp0:pcp0:tp0:model.layers.0.{name}.weight": "1f" for name in served}
    held = parameter_names([told, {"lm_head.weight": "1f", "model.rotary_emb.cos_sin_cache": "1f"}])
    assert check_against_parameters(read, held) == "names"
    with pytest.raises(NamesDiffer, match=r"missing from the directory: model\.norm\.weight"):
        check_against_parameters(read, held | {"model.norm.weight"})
    with pytest.raises(NamesDiffer, match=r"unknown to the server: model\.layers\.0\.mlp\.down_proj\.weight"):
        check_against_parameters(read, held - {"model.layers.0.mlp.down_proj.weight"})


def test_nothing_answers(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    assert main(["push", str(checkpoint), "--to", "http://127.0.0.1:1"]) == 3
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "code", "message"),
    [
        ({}, 4, "neither vLLM nor SGLang"),
        ({"/version": {"version": "9"}}, 4, "neither vLLM nor SGLang"),
        (VLLM, 4, "VLLM_SERVER_DEV_MODE=1"),
        ({"/model_info": (401, {})}, 4, "--api-key-env"),
        ({**VLLM, "/server_info": {"vllm_config": {"device_config": {"device": "cpu"}}}}, 4, "--worker-extension-cls"),
    ],
)
def test_a_server_that_cannot_take_weights(
    serving: Callable[..., Recorder],
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,
    answers: dict[str, Any],
    code: int,
    message: str,
) -> None:
    server = serving(answers)
    assert main(["push", str(checkpoint), "--to", server.url]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dockyard-refit: ")
    assert message in last
    assert [path for path in server.posts if path != "/weight_checker"] == []


def test_sglang_reads_the_directory_while_it_is_paused(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    server = serving(sglang(checkpoint))
    assert main(["push", str(checkpoint), "--to", server.url, "--version", "12"]) == 0
    assert server.posts == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    wanted = {"model_path": str(checkpoint), "weight_version": "12", "flush_cache": True, "abort_all_requests": False}
    assert server.bodies["/update_weights_from_disk"] == wanted
    out = capsys.readouterr().out
    assert "pushed 0.0 MB in 2 tensors to SGLang 0.5.23: version 12, disk, " in out
    assert "MB/s" in out
    assert "compared: names and shapes" in out


def test_another_model_is_refused_before_anything_changes(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "served", {"model.norm.weight": torch.ones(6), "extra": torch.ones(1)})
    server = serving(sglang(other))
    assert main(["push", str(checkpoint), "--to", server.url]) == 5
    said = capsys.readouterr().err
    assert "model.norm.weight (5,) != (6,)" in said
    assert "missing from the update: extra" in said
    assert server.posts == []


def test_a_refused_update_resumes_the_server_and_fails(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    refusal = (400, {"success": False, "message": "no such\nfile"})
    server = serving(sglang(checkpoint, **{"/update_weights_from_disk": refusal}))
    assert main(["push", str(checkpoint), "--to", server.url, "--transport", "disk"]) == 7
    assert server.posts[-1] == "/continue_generation"
    assert "/update_weights_from_disk answered 400: no such file" in capsys.readouterr().err


def test_a_label_that_did_not_change_is_a_failure(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    server = serving(sglang(checkpoint, **{"/update_weights_from_disk": {"success": True}}))
    assert main(["push", str(checkpoint), "--to", server.url]) == 7
    assert "serves version default, not 1" in capsys.readouterr().err


def test_a_group_that_the_server_refuses_pauses_nobody(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    server = serving(sglang(checkpoint, **{"/init_weights_update_group": (400, {"success": False, "message": "no"})}))
    assert main(["push", str(checkpoint), "--to", server.url, "--transport", "collective"]) == 7
    assert server.posts == ["/init_weights_update_group"]
    assert "/init_weights_update_group answered 400: no" in capsys.readouterr().err


def test_workers_that_sglang_would_number_twice_are_refused(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    server = serving(sglang(checkpoint, **{"/server_info": {"dp_size": 2, "device": "cpu"}}))
    assert main(["push", str(checkpoint), "--to", server.url, "--transport", "collective"]) == 4
    assert server.posts == []
    assert "use --transport disk" in capsys.readouterr().err


def test_the_deadline_covers_a_server_that_does_not_answer(
    serving: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    over = threading.Event()
    server = serving(sglang(checkpoint, **{"/update_weights_from_disk": lambda _: over.wait(60)}))
    assert main(["push", str(checkpoint), "--to", server.url, "--timeout", "1"]) == 6
    over.set()
    assert server.posts[-1] == "/continue_generation"
    assert "/update_weights_from_disk did not answer within 1 s" in capsys.readouterr().err


def test_a_key_that_is_not_set_is_a_wrong_argument(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    arguments = ["push", str(checkpoint), "--to", "http://127.0.0.1:1", "--api-key-env", "DOCKYARD_NO_SUCH_KEY"]
    assert main(arguments) == 2
    assert "DOCKYARD_NO_SUCH_KEY, which is not set" in capsys.readouterr().err
