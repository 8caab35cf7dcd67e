"""The command line of offline training -> one frozen record."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from dockyard_core.advantage import Baseline, Scale
from dockyard_core.errors import ConfigError
from dockyard_core.loss_config import LossConfig
from dockyard_core.offline.rows import Command
from dockyard_core.offline.usage import build_parser

DEFAULT_BATCH_SIZE = 64
_SFT_LEARNING_RATE = 1e-5
_SFT_LOSS = {"variant": "reinforce", "correction": "none"}
_SFT_LOSS_FIELDS = {
    "aggregation",
    "max_tokens",
    "kl_coef",
    "kl_estimator",
    "kl_gradient",
    "kl_max",
    "entropy_coef",
}
_SHORTHANDS = ("learning_rate", "schedule", "warmup_steps", "weight_decay", "max_grad_norm", "dtype", "device")
"""Options that set the policy field of their name."""
_FAR_AWAY = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineOptions:
    """Everything the user said."""

    command: Command
    model: str
    data: Path
    out: Path
    batch_size: int | None
    """Rows of a step; None = the default, or the rows name their step."""
    steps: int | None
    epochs: int | None
    is_shuffled: bool
    seed: int
    micro_batch_tokens: int
    temperature: float
    baseline: Baseline
    scale: Scale
    save_every: int
    """0 = only at the end."""
    keep: int
    resume: Literal["auto", "must", "never"]
    is_plain: bool
    policy_fields: Mapping[str, Any]
    """Of the backend's configuration, without ``total_steps`` unless it was given."""

    def policy_config(
        self, kind: type[BaseModel], *, total_steps: int | None, defaults: Mapping[str, Any] | None = None
    ) -> Any:
        """Build the policy's configuration.

        Args:
            kind: the backend's class.
            total_steps: of the run, for schedules that decay; None = not known yet.
            defaults: fields for what the user left open; None = none.

        Raises ConfigError in one line.
        """
        fields = {**(defaults or {}), **self.policy_fields}
        if fields.get("schedule", "constant") != "constant":
            fields.setdefault("total_steps", total_steps or _FAR_AWAY)
        return _validate(kind, fields, "--policy")


def parse_options(arguments: Sequence[str] | None, *, prog: str, policy_config: type[BaseModel]) -> OfflineOptions:
    """Read the command line.

    Raises:
        ConfigError: a mistake, in one line.
        SystemExit: after ``--help``, or for what argparse itself refuses.
    """
    given = build_parser(prog).parse_args(arguments)
    is_grpo = given.command == "grpo"
    options = OfflineOptions(
        command=given.command,
        model=_absolute(given.model),
        data=given.data,
        out=given.out,
        batch_size=given.batch_size,
        steps=given.steps,
        epochs=given.epochs,
        is_shuffled=given.shuffle,
        seed=given.seed,
        micro_batch_tokens=given.micro_batch_tokens,
        temperature=given.temperature if is_grpo else 1.0,
        baseline=given.baseline if is_grpo else get_args(Baseline)[0],
        scale=given.scale if is_grpo else get_args(Scale)[0],
        save_every=given.save_every,
        keep=given.keep,
        resume=given.resume,
        is_plain=given.plain,
        policy_fields=_policy_fields(given, policy_config),
    )
    options.policy_config(policy_config, total_steps=given.steps)  # a mistake is told before the data is read
    return options


def _absolute(model: str) -> str:
    """A directory by its full path, so that a run can go on from another working directory; ids stay."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _policy_fields(given: argparse.Namespace, policy_config: type[BaseModel]) -> dict[str, Any]:
    fields = _assignments(given.policy, "--policy", policy_config)
    for name, option in (("loss", "--loss"), ("seed", "--seed")):
        if name in fields:
            raise ConfigError(f"--policy {name} must be given as {option}, got {fields[name]!r}; use {option}")
    for name in _SHORTHANDS:
        value = getattr(given, name)
        if value is None:
            continue
        if name not in policy_config.model_fields:
            raise ConfigError(f"--{name} must be a field of {policy_config.__name__}, got {value!r}; leave it out")
        if name in fields:
            raise ConfigError(f"{name} must be given once, got {value!r} and --policy {name}; leave out one")
        fields[name] = value
    loss = _assignments(given.loss, "--loss", LossConfig)
    if given.command == "sft":
        for name in loss:
            if name not in _SFT_LOSS_FIELDS:
                raise ConfigError(
                    f"--loss {name} has no meaning for sft, which minimises the negative log-likelihood, "
                    f"got {loss[name]!r}; leave it out, or run grpo"
                )
        loss |= _SFT_LOSS
        fields.setdefault("learning_rate", _SFT_LEARNING_RATE)
    return fields | {"loss": _validate(LossConfig, loss, "--loss"), "seed": given.seed}


def _assignments(words: Sequence[str], option: str, kind: type[BaseModel]) -> dict[str, Any]:
    """``key=value`` words, where a value is JSON or else text; ``a.b=1`` reaches into a nested field."""
    fields: dict[str, Any] = {}
    for word in words:
        name, has_value, text = word.partition("=")
        first, *inner = name.split(".")
        if not has_value:
            raise ConfigError(f"{option} must be key=value, got {word!r}; write for example {_example(kind)}")
        if first not in kind.model_fields:
            raise _unknown_field(option, kind, first)
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        target = fields
        for part, following in zip([first, *inner], [*inner, None], strict=True):
            if following is None:
                target[part] = value
            else:
                target = target.setdefault(part, {})
                if not isinstance(target, dict):
                    raise ConfigError(f"{option} {part} must be given whole or in parts, got {word!r}; choose one way")
    return fields


def _unknown_field(option: str, kind: type[BaseModel], name: str) -> ConfigError:
    usual = {"lr": "learning_rate"}.get(name)  # by spelling it would be lora
    closest = usual or difflib.get_close_matches(name, kind.model_fields, n=1, cutoff=0.0)[0]
    return ConfigError(f"{option} must name a field of {kind.__name__}, got {name!r}; did you mean {closest}?")


def _inner(kind: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The class of a nested configuration."""
    for part in path:
        annotation = kind.model_fields[str(part)].annotation
        choices = [annotation, *get_args(annotation)]
        kind = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))
    return kind


def _example(kind: type[BaseModel]) -> str:
    return "clip_high=0.28" if kind is LossConfig else "dtype=bfloat16"


def _validate(kind: type[BaseModel], fields: Mapping[str, Any], option: str) -> Any:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *path, last = first["loc"] or ("",)
        if first["type"] == "extra_forbidden":
            inner = _inner(kind, path)
            raise _unknown_field(" ".join([option, ".".join(map(str, path))]).strip(), inner, str(last)) from error
        name = ".".join(map(str, first["loc"]))
        if name in _SHORTHANDS:
            option, name = "--lr" if name == "learning_rate" else f"--{name.replace('_', '-')}", ""
        rule = str(first["msg"]).removeprefix("Value error, ")
        start = f"{option} {name}".strip()
        if first["type"] == "value_error":  # of our own validators, whose messages are complete
            raise ConfigError(f"{start}: {rule}") from error
        way_out = f"write {name}.FIELD=VALUE" if first["type"] == "model_type" else "correct it"
        raise ConfigError(f"{start}: {rule}, got {first['input']!r}; {way_out}") from error
