"""Starts and ends an SGLang server as a child process that cannot outlive this one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dockyard_core.errors import GeneratorError
from dockyard_inference.sglang_engine.config import SglangConfig

MAKE_ENVIRONMENT = "python tools/sglang_env.py VENV"
"""The command that makes an environment with SGLang."""
_GUARD = Path(__file__).with_name("guard.py")
_SHARED_MEMORY = Path("/dev/shm")
_STOP_S = 30.0
_LAST_LINES, _LAST_CHARACTERS, _LAST_BYTES = 12, 1500, 16 << 10
_KEEP_ALIVE_S = "86400"
"""The client closes idle connections; one that the server closes may just have been taken for a request."""
_MARGIN = 8
"""SGLang refuses requests of a few tokens less than its context length."""
_LOST_HERE = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Of this environment, wrong in another; without compiled modules a start takes twice as long."""


class ServerProcess:
    """A guard process, the server under it, and the folders that the guard removes.

    Args:
        config: with ``python``: start a server; with ``url``: only watch over a folder for weights.
    """

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._scratch = Path(tempfile.mkdtemp(prefix="dockyard-sglang-"))
        self.weights = self._make_weights_folder()
        self.api_key: str | None = None
        self.url = config.url or ""
        self.label = f"starting-{secrets.token_hex(8)}"
        """The weight version that the server starts with: nobody else's server has it."""
        command: list[str] = []
        if config.python is not None:
            self.api_key = secrets.token_hex(16)
            port = _free_port()
            self.url = f"http://127.0.0.1:{port}"
            command = [str(config.python), "-m", "sglang.launch_server", *self._arguments(port)]
        log = self._scratch / "server.log"
        with log.open("wb") as output:
            self._guard = self._start(command, output.fileno())
        # The guard removes the file; its last lines are wanted then.
        self._log = log.open("rb")

    @property
    def pid(self) -> int:
        """Of the guard, whose children the server's processes are."""
        return self._guard.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's main process lives; of a server at ``url``, whether the guard does."""
        return self._guard.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the server."""
        return self._guard.poll()

    def last_words(self) -> str:
        """What a server of this process said last, on one line."""
        if self._config.python is None or self._log.closed:
            return ""
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _LAST_BYTES))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return f"its last lines: {' | '.join([line for line in lines if line][-_LAST_LINES:])[-_LAST_CHARACTERS:]}"

    def stop(self) -> None:
        """Kill every process of the server and remove its folders; blocks for a moment. Harmless twice."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # its child's death signal follows
            self._guard.wait()
        self._log.close()
        for folder in (self._scratch, self.weights):
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        folders = [str(self._scratch), str(self.weights)]
        environment = {name: value for name, value in os.environ.items() if name not in _LOST_HERE}
        environment |= {
            "TMPDIR": str(self._scratch),
            "OMP_NUM_THREADS": str(self._config.num_threads),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for _MARGIN; no request goes beyond max_model_len
            "SGLANG_TIMEOUT_KEEP_ALIVE": _KEEP_ALIVE_S,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if Path(self._config.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if self._config.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(len(folders)), *folders, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            cwd=self._scratch,
            start_new_session=True,  # a Ctrl-C on the terminal is the owner's to handle
        )
        assert guard.stdin is not None, "it is a pipe"
        guard.stdin.write(json.dumps(environment).encode() + b"\n")
        guard.stdin.flush()
        return guard

    def _arguments(self, port: int) -> list[str]:
        """Command-line words; the key is in a file, because everybody can read command lines."""
        settings = self._scratch / "server.yaml"
        settings.touch(mode=0o600)
        settings.write_text(f"api-key: {self.api_key}\n")
        config = self._config
        options: dict[str, Any] = {
            "config": str(settings),
            "model_path": config.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": config.dtype,
            "device": config.device,
            "context_length": config.max_model_len + _MARGIN,
            "max_running_requests": config.max_num_seqs,
            "max_total_tokens": num_cached_tokens(config),
            "weight_version": self.label,
            "random_seed": config.seed,
            "trust_remote_code": config.trust_remote_code,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "enable_priority_scheduling": True,
            "disable_priority_preemption": True,
            "disable_radix_cache": not config.enable_prefix_caching,
            "log_level": "warning",
        }
        if config.device == "cpu":
            options |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
            }
        return command_line(options | config.server_args)

    def _make_weights_folder(self) -> Path:
        wanted = self._config.weights_directory
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="dockyard-weights-", dir=wanted))
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        return Path(tempfile.mkdtemp(prefix="dockyard-weights-", dir=parent))


def check_interpreter(python: Path) -> None:
    """Raise GeneratorError unless there is something to start."""
    if not os.access(python, os.X_OK) or python.is_dir():
        raise GeneratorError(f"{python} is no interpreter: make an environment with SGLang: {MAKE_ENVIRONMENT}")


def command_line(options: dict[str, Any]) -> list[str]:
    """Options by name as words: ``true`` is the bare option, ``false`` and ``null`` leave it out."""
    words = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
    return words


def num_cached_tokens(config: SglangConfig) -> int | None:
    """Tokens whose keys and values fit into ``kv_cache_gib``, and no more than can be asked for.

    None, which leaves it to SGLang, for a model whose configuration does not tell.
    """
    most = config.max_num_seqs * config.max_model_len
    path = Path(config.model) / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    values = values.get("text_config", values)
    try:
        heads = values["num_attention_heads"]
        width = values.get("head_dim") or values["hidden_size"] // heads
        per_token = 2 * values["num_hidden_layers"] * (values.get("num_key_value_heads") or heads) * width
    except KeyError:
        return None
    num_bytes = int(per_token) * (4 if config.dtype == "float32" else 2)
    # One request must fit in any case.
    return max(config.max_model_len + _MARGIN, min(most, int(config.kv_cache_gib * (1 << 30)) // num_bytes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
