"""Every key of a configuration with its value, default, type, meaning, and where the value came from."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import OmegaConf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dockyard_grpo.config.loading import COMMAND_LINE, Layers
from dockyard_grpo.config.model import Config

DEFAULT = "default"
_SIGNS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
_NAMES: Mapping[Any, str] = {str: "text", Path: "path", NoneType: "null", bool: "true | false"}
_NARROW = 130  # columns
_WIDTH = 180  # columns, where there is no terminal to ask

_DESCRIPTIONS = {
    "loss.variant": "Surrogate: clip = PPO/GRPO tokens, cispo = detached clipped ratio, gspo = sequences, reinforce.",
    "loss.tis_max": "tis: upper bound of the behaviour ratio.",
    "loss.correction_low": "icepop: tokens with a behaviour ratio below are rejected.",
    "loss.correction_high": "icepop: tokens with a behaviour ratio above are rejected.",
    "loss.seq_low": "seq_mask: sequences with a mean behaviour ratio below are rejected.",
    "loss.seq_high": "seq_mask: sequences with a mean behaviour ratio above are rejected.",
    "loss.kl_estimator": "Estimator of the KL to the reference.",
    "loss.kl_gradient": "plain = through the estimate, score = through the log-probability of the sample.",
    "loss.aggregation": "Mean over tokens, over sequences, or a sum over a fixed length (dr_grpo).",
}
"""Of keys whose models in core leave them unexplained."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One line of the listing; values as YAML flow text."""

    name: str
    value: str
    default: str
    type: str
    description: str
    source: str
    """``default``, ``quickstart.yaml``, the file, or ``command line``."""

    @property
    def section(self) -> str:
        """The part before the first dot."""
        return self.name.partition(".")[0]


def list_keys(config: Config, layers: Layers) -> tuple[Key, ...]:
    """Every leaf of ``config``, in the order of its sections; ``layers`` say where values came from."""
    given = [(COMMAND_LINE, set(_leaves(layers.overrides))), (layers.base_name, set(_leaves(layers.base)))]
    return tuple(_keys(config, "", given))


def print_keys(keys: tuple[Key, ...], console: Console) -> None:
    """A table, or a paragraph per key on a narrow terminal; what differs from its default is bold."""
    width = console.width if console.is_terminal else _WIDTH
    if width < _NARROW:
        _print_paragraphs(keys, console)
        return
    table = Table(box=None, pad_edge=False, width=width)
    table.add_column("key", no_wrap=True)
    for title in ("value", "from", "default", "type"):
        table.add_column(title, overflow="fold")
    table.add_column("meaning", ratio=1, min_width=24)
    for before, key in pairwise([keys[0], *keys]):
        if before.section != key.section:
            table.add_row()
        cells = (key.name, key.value, key.source, key.default, key.type, key.description)
        table.add_row(*cells, style=_style(key))
    console.print(table, markup=False, width=width, crop=False)


def _print_paragraphs(keys: tuple[Key, ...], console: Console) -> None:
    for key in keys:
        console.print(f"{key.name} = {key.value}  ({key.source})", markup=False, style=_style(key))
        meaning = Text(f"{key.description} {key.type}; default {key.default}.")
        console.print(Padding(meaning, (0, 0, 0, 4)))


def _style(key: Key) -> str | None:
    return None if key.source == DEFAULT else "bold"


def _keys(model: BaseModel, prefix: str, given: list[tuple[str, set[str]]]) -> Iterator[Key]:
    documented = _attribute_docstrings(type(model))
    for name, field in type(model).model_fields.items():
        value, key = getattr(model, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{key}.", given)
            continue
        sources = (layer for layer, leaves in given if any(_covers(leaf, key) for leaf in leaves))
        description = field.description or documented.get(name) or _DESCRIPTIONS.get(key, "")
        yield Key(
            name=key,
            value=_flow(value),
            default=_flow(field.get_default(call_default_factory=True)),
            type=_type_name(field.annotation, field),
            description=" ".join(description.replace("`", "").split()),
            source=next(sources, DEFAULT),
        )


def _covers(leaf: str, key: str) -> bool:
    return leaf == key or leaf.startswith(f"{key}.") or key.startswith(f"{leaf}.")


def _leaves(node: Any) -> Iterator[str]:
    def walk(value: Any, prefix: str) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from walk(inner, f"{prefix}.{name}" if prefix else str(name))
        elif prefix:
            yield prefix

    return walk(OmegaConf.to_container(node, resolve=False), "")


def _flow(value: Any) -> str:
    """As one would write it behind ``key=``."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    return str(value)


def _type_name(annotation: Any, field: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        inner = [_type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"[{', '.join(inner)}{', ...' if Ellipsis in arguments else ''}]"
    if origin is dict:
        return "{" + ": ".join(_type_name(argument) for argument in arguments) + "}"
    bounds = _bounds(tuple(field.metadata)) if field is not None else ""
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))) + bounds


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = (_SIGNS[type(bound)] + (bound,) for bound in metadata if type(bound) in _SIGNS)
    found = [f"{sign} {getattr(bound, attribute)}" for sign, attribute, bound in signs]
    return f" {', '.join(found)}" if found else ""


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """First paragraphs of the strings under a model's fields, as the documentation shows them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, text in pairwise(body):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = str(text.value.value).split("\n\n")[0]  # type: ignore[attr-defined]
    return found
