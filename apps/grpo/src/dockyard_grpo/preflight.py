"""What can be known before anything heavy starts: `check` costs about a second and spares a late failure.

Nothing here imports torch, transformers, vLLM or Ray.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from urllib import request
from urllib.error import HTTPError

from dockyard_core import ConfigError, DataError, Task
from dockyard_core.reward import load_reward
from dockyard_grpo import compose
from dockyard_grpo.cluster import plan_fleets
from dockyard_grpo.config import Config
from dockyard_grpo.model_directory import ModelDirectory

MIN_GIT = (2, 39, 4)
"""Older ones can be made to write outside the tree (CVE-2023-23946, CVE-2023-25652, CVE-2024-32021)."""
_BYTES_PER_PARAMETER = 16
"""Of a checkpoint: float32 weights, two moments, and the exported model."""
_KEY_OF_AXIS = {
    "fsdp_size": "policy.num_ranks / policy.tensor_parallel_size",
    "tensor_parallel_size": "policy.tensor_parallel_size",
}
"""What the JAX trainer's names are here."""
_READY_TIMEOUT_S = 5.0
_MIN_FREE_BYTES = 256 << 20


def check(config: Config) -> None:
    """Run every check of ``CHECKS``, cheapest first. Raises ConfigError for the first that fails."""
    for run in CHECKS.values():
        run(config)


def model_directory(config: Config) -> ModelDirectory | None:
    """policy.model as a directory; None for a hub id, which is resolved when the model loads.

    Raises ConfigError when it can be neither.
    """
    name = compose.model_path(config)
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelDirectory(path)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        what = "a file" if path.exists() else "no such directory"
        raise ConfigError(f"policy.model must be a directory or a hub id, got {name!r}: {what}; check the path")
    return None


def check_model(config: Config) -> str:
    """Raise ConfigError unless policy.model is a hub id, or a directory that fits the rest; returns what it is."""
    model = model_directory(config)
    if model is None:
        return f"hub id {config.policy.model}, checked when it loads"
    model_type, parameters = model.config["model_type"], model.num_parameters
    model.check_vocabulary()
    if config.data.prompt_template == "chat" and not model.has_chat_template:
        raise ConfigError(
            f"data.prompt_template=chat needs a tokenizer with a chat template, got none in {str(model.path)!r}; "
            "use auto or plain"
        )
    length, heads = config.generation.max_model_len, model.config.get("num_attention_heads")
    if model.max_positions is not None and length > model.max_positions:
        raise ConfigError(
            f"generation.max_model_len must be <= the model's max_position_embeddings ({model.max_positions}), "
            f"got {length}; lower it, or choose another model"
        )
    parts = config.generation.tensor_parallel_size
    if isinstance(heads, int) and heads % parts:
        raise ConfigError(
            f"generation.tensor_parallel_size must divide the model's {heads} attention heads, got {parts}; lower it"
        )
    return f"{model_type}, {parameters:,} parameters, in {model.path}"


def check_run_dir(config: Config) -> str:
    """Raise ConfigError unless the run directory can be made and a checkpoint fits; returns the free space."""
    target = (config.run.dir or Path("runs")).expanduser().absolute()
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"run.dir must be a directory, got {str(target)!r}: {str(existing)!r} is a file; choose another"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir must be writable, got {str(target)!r}: {str(existing)!r} is not; choose another run.dir"
        )
    model = model_directory(config)
    parameters = model.num_parameters if model is not None else 0
    kept = 1 if config.checkpoint.every_steps is None else config.checkpoint.keep_last + 1
    needed = _MIN_FREE_BYTES + kept * parameters * _BYTES_PER_PARAMETER
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"run.dir needs about {_gib(needed)} for {kept} checkpoints, got {_gib(free)} free at {str(existing)!r}; "
            "free some space, choose another run.dir, or lower checkpoint.keep_last"
        )
    return f"{_gib(free)} free at {existing}, a run needs about {_gib(needed)}"


def check_reward(config: Config) -> str:
    """Raise ConfigError unless reward.kind loads; returns its name."""
    try:
        load_reward(config.reward.kind)
    except ConfigError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"reward.kind must import, got {config.reward.kind!r}: {type(error).__name__}: {error}; mend the module"
        ) from error
    return config.reward.kind


def check_trainer(config: Config) -> str:
    """Raise ConfigError unless what policy.backend requires is installed and takes the model; returns its name."""
    compose.check_trainer_installed(config)
    model = model_directory(config)
    if config.policy.backend == "jax" and model is not None:
        try:
            compose.check_jax_model(config, model.path)
        except ConfigError as error:
            name, _, rest = str(error).partition(" ")
            raise ConfigError(f"{_KEY_OF_AXIS.get(name, name)} {rest}") from error
    return config.policy.backend


def check_engine(config: Config) -> str:
    """Raise ConfigError unless what generation.backend requires is installed; returns what was found."""
    backend, had_ray = config.generation.backend, sys.modules.get("ray") is not None
    try:
        compose.check_engine_installed(config)
    except ConfigError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"generation.backend must import, got {backend!r}: {type(error).__name__}: {error}; mend the module"
        ) from error
    if not had_ray and sys.modules.get("ray") is not None:
        raise ConfigError(
            f"generation.backend must not import ray with its module, got {backend!r}: Ray is set up before it is "
            "imported; import it in start()"
        )
    return find_sglang(config) if backend == "sglang" else backend


def find_sglang(config: Config) -> str:
    """Version and place of the SGLang that will serve; nothing of it is run. Raises ConfigError where it is not."""
    section = config.generation.sglang
    if section.python is None:
        return f"sglang at {section.url}"
    environment = section.python.parent.parent
    found = sorted(environment.glob("lib/python3*/site-packages/sglang-*.dist-info"))
    if not section.python.is_file() or not found:
        why = "it has no SGLang" if section.python.is_file() else "no such file"
        raise ConfigError(
            "generation.sglang.python must be the interpreter of an environment with SGLang, got "
            f"{str(section.python)!r}: {why}; make one: python tools/sglang_env.py VENV"
        )
    return f"sglang {found[0].name.removeprefix('sglang-').removesuffix('.dist-info')} in {environment}"


def check_cluster(config: Config) -> str:
    """Raise ConfigError unless this machine can be a node of cluster.address; returns what is joined."""
    address = config.cluster.address
    if address is None:
        return "none to join: Ray is started here"
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address must be the address of Ray's head, HOST:PORT, got {address!r}: a run writes its files "
            "on a node of the cluster; join it with `ray start --address=HOST:6379` and name that address"
        )
    return f"joins {address}"


def check_gpus(config: Config) -> str:
    """Raise ConfigError when this machine's fleets ask for more GPUs than it has; returns their number."""
    found = visible_gpus()
    if config.cluster.address is not None or found is None:
        return "counted when Ray starts"
    plan_fleets(config, found)
    return f"{found} GPUs"


def visible_gpus() -> int | None:
    """GPUs that Ray will see here, without any driver's library; None = cannot be told."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbered = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    others = [path for path in (Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/accel")) if path.exists()]
    if (others and not numbered) or (visible is not None and "MIG" in visible):
        return None
    if visible is None:
        return len(numbered)
    return min(len(numbered), len([device for device in visible.split(",") if device.strip()]))


def check_git(config: Config) -> str:
    """Raise ConfigError unless git is there and new enough for patches that nobody trusts; returns its version."""
    if shutil.which("git") is None:
        raise ConfigError("git must be installed, found none on PATH; install it: apt-get install git")
    answer = subprocess.run(["git", "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", answer)
    found = tuple(int(number or 0) for number in numbers.groups()) if numbers else (0,)
    if found < MIN_GIT:
        least = ".".join(map(str, MIN_GIT))
        raise ConfigError(
            f"git must be >= {least}, got {'.'.join(map(str, found))}: patches of a policy could write outside their "
            "tree; upgrade it: apt-get install git"
        )
    return ".".join(map(str, found))


def check_sandbox(config: Config) -> str:
    """Raise ConfigError unless verdicts can be had at sandbox.min_isolation; returns the level."""
    if config.sandbox.url is not None:
        return f"{server_isolation(config)} at {config.sandbox.url}"
    if config.cluster.address is not None:
        return "probed on the nodes of the cluster"
    return compose.local_isolation(config.sandbox.min_isolation)


def server_isolation(config: Config) -> str:
    """The isolation that the server at ``sandbox.url`` gives, by its own word.

    Raises ConfigError unless it is ready and gives at least ``sandbox.min_isolation``.
    """
    levels = compose.isolation_levels()
    url, minimum, token = config.sandbox.url or "", config.sandbox.min_isolation, compose.read_token(config)
    rule = f"sandbox.url must name a running dockyard-sandbox, got {url!r}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{rule}: no http:// or https:// in front; write it as http://HOST:PORT")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    direct = request.build_opener(request.ProxyHandler({}))
    try:
        with direct.open(
            request.Request(f"{url.rstrip('/')}/readyz", headers=headers), timeout=_READY_TIMEOUT_S
        ) as reply:
            level = json.load(reply)["isolation"]
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(f"{rule}: it refuses the token; set sandbox.token_file to its token") from error
        raise ConfigError(f"{rule}: it answers {error.code} to /readyz; check the address") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{rule}: {reason}; start it with: dockyard-sandbox serve") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{rule}: its /readyz is not a sandbox's; check the address") from error
    if level not in levels or (minimum is not None and levels.index(level) < levels.index(minimum)):
        raise ConfigError(
            f"sandbox.min_isolation is {minimum}, but the server at {url} gives {level!r}; move it to a machine that "
            "gives more, or lower sandbox.min_isolation"
        )
    return str(level)


def check_repositories(config: Config, tasks: Sequence[Task]) -> None:
    """Raise DataError for a task whose repository no sandbox of this run can know.

    A name such as ``owner/project`` must have been registered with a server, and the servers that a
    run starts know none.
    """
    for task in tasks if config.sandbox.url is None else ():
        if not Path(task.repo).is_absolute() and "://" not in task.repo:
            raise DataError(
                f"{task.instance_id}: repo: must be a path or a file:// or https:// URL, got the name {task.repo!r}; "
                "write its URL, or register the name with a server of yours and set sandbox.url"
            )


CHECKS: Mapping[str, Callable[[Config], str]] = MappingProxyType(
    {
        "model": check_model,
        "run directory": check_run_dir,
        "reward": check_reward,
        "trainer": check_trainer,
        "engine": check_engine,
        "cluster": check_cluster,
        "GPUs": check_gpus,
        "git": check_git,
        "sandbox": check_sandbox,
    }
)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
