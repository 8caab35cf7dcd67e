"""YAML file + ``key=value`` overrides -> `Config`; every mistake is one line that names the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from dockyard_core import ConfigError
from dockyard_grpo.config.model import Config

QUICKSTART = "quickstart.yaml"
COMMAND_LINE = "command line"

_RESHAPING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "guided_decoding",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logit_bias",
        "logits_processors",
        "min_tokens",
        "presence_penalty",
        "structured_outputs",
        "typical_p",
    }
)
"""Keys of engines that change the distribution which is sampled, and with it the importance ratio."""

_NAMES_ELSEWHERE = {
    "async_level": "grpo.max_staleness",
    "batch_size": "grpo.num_prompts_per_step",
    "beta": "loss.kl_coef",
    "clip_eps": "loss.clip_low",
    "epsilon": "loss.clip_low",
    "group_size": "grpo.num_generations_per_prompt",
    "kl_beta": "loss.kl_coef",
    "lr": "policy.learning_rate",
    "max_async_level": "grpo.max_staleness",
    "max_completion_length": "generation.max_new_tokens",
    "max_response_length": "generation.max_new_tokens",
    "num_samples_per_prompt": "grpo.num_generations_per_prompt",
    "tp": "generation.tensor_parallel_size",
    "tp_size": "generation.tensor_parallel_size",
    "train_batch_size": "grpo.num_prompts_per_step",
}


_TIME = re.compile(r"^(checkpoint\.must_save_by=)([\d:]+)$")
"""An override that YAML would read as a number to the base of 60."""


class Layers(NamedTuple):
    """What a configuration is merged from, over the models' defaults."""

    base_name: str
    """``quickstart.yaml``, the file's name, or empty when the defaults are the base."""
    base: DictConfig
    overrides: DictConfig


def load_config(file: Path | None, overrides: Sequence[str]) -> Config:
    """Merge and validate. Without a file, the quickstart is the base, unless the overrides bring
    their own model or data: then the base is the models' defaults, which suit real models.

    Raises ConfigError with one line: the rule, the value and the way out.
    """
    return validate(read_layers(file, overrides))


def read_layers(file: Path | None, overrides: Sequence[str]) -> Layers:
    """Read the file, the resumed run's or the quickstart, and parse the overrides. Raises ConfigError."""
    parsed = _parse_overrides(overrides)
    resumed = resumed_run(overrides)
    if file is not None:
        return Layers(str(file), _read_yaml(file), parsed)
    if resumed is not None:
        base = _read_yaml(resumed / "config.yaml")
        OmegaConf.update(base, "run.dir", None)  # it may have been moved
        return Layers(str(resumed / "config.yaml"), base, parsed)
    if uses_quickstart(file, overrides):
        text = resources.files("dockyard_grpo").joinpath(QUICKSTART).read_text()
        return Layers(QUICKSTART, _as_mapping(OmegaConf.create(text), QUICKSTART), parsed)
    return Layers("", OmegaConf.create({}), parsed)


def validate(layers: Layers) -> Config:
    """Merge and check every value. Raises ConfigError for the first mistake, and counts the others."""
    try:
        values = OmegaConf.to_container(OmegaConf.merge(layers.base, layers.overrides), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"configuration cannot be merged: {_one_line(error)}; check the override's type") from error
    assert isinstance(values, dict), "two mappings merge to one"
    _refuse_unknown_keys(values)
    _refuse_borrowed_clip_range(layers)
    try:
        return _with_resumed_directory(Config.model_validate(values))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _with_resumed_directory(config: Config) -> Config:
    """``run.resume=DIR``, wherever it was written, makes DIR the run directory."""
    resume, directory = config.run.resume, config.run.dir
    if resume is None:
        return config
    if resume == "auto":
        if directory is None:
            raise ConfigError("run.resume=auto goes on with run.dir, got run.dir=null; set run.dir=DIR")
        return config
    resumed = Path(resume).expanduser().absolute()
    if not (resumed / "config.yaml").is_file():
        raise ConfigError(f"run.resume must be auto or a run directory with config.yaml, got {resume!r}")
    if directory not in (None, resumed):
        raise ConfigError(f"run.resume={resume} goes on in its own directory, got run.dir={directory}; leave it out")
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": resumed})})


def resumed_run(overrides: Sequence[str]) -> Path | None:
    """The run directory that ``run.resume=DIR`` names; its config.yaml is then the base."""
    named = [override.partition("=")[2] for override in overrides if override.startswith("run.resume=")]
    if not named or named[-1] in ("auto", "null", ""):
        return None
    resumed = Path(named[-1]).expanduser().absolute()
    if not (resumed / "config.yaml").is_file():
        raise ConfigError(f"run.resume must be auto or a run directory with config.yaml, got {named[-1]!r}")
    return resumed


def uses_quickstart(file: Path | None, overrides: Sequence[str]) -> bool:
    """Whether the bundled quickstart is the base of this configuration."""
    own = ("policy.model=", "data.train=")
    is_own = any(override.startswith(own) for override in overrides)
    return file is None and not is_own and resumed_run(overrides) is None


def dump_config(config: Config) -> str:
    """YAML of every value, resolved; ``load_config`` of it gives an equal configuration."""
    return str(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, sign, _ = override.partition("=")
        if not sign or not key.strip() or key.startswith("-"):
            raise ConfigError(f"an override is section.key=value, got {override!r}; see: uv run apps/grpo --help")
    try:
        return OmegaConf.from_dotlist([_TIME.sub(r"\1'\2'", override) for override in overrides])
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"an override cannot be read: {_one_line(error)}; quote the value") from error


def _read_yaml(file: Path) -> DictConfig:
    if not file.is_file():
        raise ConfigError(f"--config must name a YAML file, got {str(file)!r}; check the path")
    try:
        loaded = OmegaConf.load(file)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_one_line(error)}") from error
    return _as_mapping(loaded, str(file))


def _as_mapping(loaded: DictConfig | ListConfig, name: str) -> DictConfig:
    if not isinstance(loaded, DictConfig):
        raise ConfigError(
            f"a configuration is a mapping of sections, got a list in {name}; write section: {{key: value}}"
        )
    return loaded


def _valid_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _valid_keys(field.annotation, f"{prefix}{name}.")


def _given_keys(values: dict[Any, Any], valid: set[str], prefix: str = "") -> Iterator[str]:
    """Keys to check: leaves, but a mapping that is itself a value (such as penalties) as a whole."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_value = key in valid and not any(other.startswith(f"{key}.") for other in valid)
        if isinstance(value, dict) and value and not is_value:
            yield from _given_keys(value, valid, f"{key}.")
        else:
            yield key


def _refuse_unknown_keys(values: dict[Any, Any]) -> None:
    valid = set(_valid_keys())
    for key in _given_keys(values, valid):
        if key in valid:
            continue
        if not _RESHAPING.isdisjoint(key.split(".")):
            raise ConfigError(
                f"{key} is refused: it reshapes the sampled distribution, whose logprobs would bias the importance "
                "ratio; leave it out, and shape sampling with generation.temperature"
            )
        raise ConfigError(f"unknown key {key!r}; {_closest(key, valid)}")


def _refuse_borrowed_clip_range(layers: Layers) -> None:
    """A sequence ratio needs its own clip range: the one that the base gave for token ratios is 1000 times too wide."""
    if OmegaConf.select(layers.overrides, "loss.variant") != "gspo":
        return
    missing = [f"loss.{name}" for name in ("clip_low", "clip_high") if name not in (layers.overrides.get("loss") or {})]
    if missing and OmegaConf.select(layers.base, "loss.variant") != "gspo":
        raise ConfigError(
            f"loss.variant='gspo' needs its own clip range, got none for {' and '.join(missing)}; set loss.clip_low "
            "and loss.clip_high, of the order of 3e-4 and 4e-4"
        )


def _closest(key: str, valid: set[str]) -> str:
    leaf = key.rpartition(".")[2]
    leaves: dict[str, list[str]] = {}
    for other in sorted(valid):
        leaves.setdefault(other.rpartition(".")[2], []).append(other)
    section = key.partition(".")[0]
    siblings = [other.rpartition(".")[2] for other in valid if other.startswith(f"{section}.")]
    matches = (
        leaves.get(leaf)
        or ([_NAMES_ELSEWHERE[leaf]] if leaf in _NAMES_ELSEWHERE else [])
        or [f"{section}.{close}" for close in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
        or ([] if siblings else difflib.get_close_matches(key, valid, n=1, cutoff=0.6))
        or [full for close in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6) for full in leaves[close]]
    )
    if not matches:
        return "list the keys with: uv run apps/grpo config"
    named = [f"{match!r} (section {match.partition('.')[0]!r})" for match in matches[:3]]
    return f"did you mean {' or '.join(named)}?"


def _explain(error: ValidationError) -> str:
    first, *others = error.errors()
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] != "value_error":
        return f"{key}: {message}, got {first.get('input')!r}{more}; see: uv run apps/grpo config"
    if not key or message.startswith(f"{key.partition('.')[0]}."):
        return message + more
    # The models of core do not know the section that they are.
    joint = "." if key in Config.model_fields else " " if message.startswith("must ") else ": "
    return f"{key}{joint}{message}{more}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
