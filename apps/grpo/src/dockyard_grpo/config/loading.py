"""YAML file + ``key=value`` overrides -> `Config`; every mistake is one line that names the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from dockyard_core import ConfigError
from dockyard_grpo.config.model import Config


def load_config(file: Path | None, overrides: Sequence[str]) -> Config:
    """Merge and validate. Without a file, the quickstart is the base, unless the overrides bring
    their own model or data: then the base is the models' defaults, which suit real models.

    Raises ConfigError with one line: the rule, the value and the way out.
    """
    parsed = _parse_overrides(overrides)
    base: Any
    resumed = resumed_run(overrides)
    if file is not None:
        base = _read_yaml(file)
    elif resumed is not None:
        base = OmegaConf.merge(_read_yaml(resumed / "config.yaml"), {"run": {"dir": str(resumed)}})
    elif uses_quickstart(file, overrides):
        base = OmegaConf.create(resources.files("dockyard_grpo").joinpath("quickstart.yaml").read_text())
    else:
        base = OmegaConf.create({})
    try:
        values = OmegaConf.to_container(OmegaConf.merge(base, parsed), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration cannot be merged: {_one_line(error)}; check the override's type") from error
    if not isinstance(values, dict):
        raise ConfigError(f"a configuration is a mapping of sections, got {type(values).__name__} in {file}")
    _refuse_unknown_keys(values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def resumed_run(overrides: Sequence[str]) -> Path | None:
    """The run directory that ``run.resume=DIR`` names; its config.yaml is then the base."""
    named = [override.partition("=")[2] for override in overrides if override.startswith("run.resume=")]
    if not named or named[-1] in ("auto", "null", ""):
        return None
    if not (Path(named[-1]) / "config.yaml").is_file():
        raise ConfigError(f"run.resume must be auto or a run directory with config.yaml, got {named[-1]!r}")
    return Path(named[-1])


def uses_quickstart(file: Path | None, overrides: Sequence[str]) -> bool:
    """Whether the bundled quickstart is the base of this configuration."""
    own = ("policy.model=", "data.train=")
    return file is None and not any(override.startswith(own) for override in overrides)


def dump_config(config: Config) -> str:
    """YAML of every value, resolved; ``load_config`` of it gives an equal configuration."""
    return str(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, sign, _ = override.partition("=")
        if not sign or not key.strip() or key.startswith("-"):
            raise ConfigError(f"an override is section.key=value, got {override!r}; see: uv run apps/grpo --help")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"an override cannot be read: {_one_line(error)}; quote the value") from error


def _read_yaml(file: Path) -> DictConfig:
    if not file.is_file():
        raise ConfigError(f"--config must name a YAML file, got {str(file)!r}; check the path")
    try:
        loaded = OmegaConf.load(file)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"a configuration is a mapping of sections, got a list in {file}")
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
        if key not in valid:
            raise ConfigError(f"unknown key {key!r}; {_closest(key, valid)}")


def _closest(key: str, valid: set[str]) -> str:
    leaf = key.rpartition(".")[2]
    leaves: dict[str, list[str]] = {}
    for other in sorted(valid):
        leaves.setdefault(other.rpartition(".")[2], []).append(other)
    matches = leaves.get(leaf) or difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    if not matches:
        matches = [full for close in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6) for full in leaves[close]]
    if not matches:
        return "list the keys with: uv run apps/grpo config"
    named = [f"{match!r} (section {match.partition('.')[0]!r})" for match in matches[:3]]
    return f"did you mean {' or '.join(named)}?"


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not key or message.startswith(key.partition(".")[0]):
        return message
    return f"{key}: {message}, got {first.get('input')!r}; see: uv run apps/grpo config"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
