"""Writes the configuration reference from the pydantic models, so that nothing about a key is typed by hand.

``{config-reference}`` becomes one section and one table per section of the configuration. ``{config}`` is a role that
links to a section or a key by its name; a name that does not exist is a warning, like any broken reference.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from docutils import nodes  # type: ignore[import-untyped]
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.std import StandardDomain
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.typing import ExtensionMetadata

from dockyard_grpo.config import Config

_COLUMNS = {"key": 25, "type": 20, "default": 15, "description": 40}
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}


class Key(NamedTuple):
    """One key of the configuration, as the reference shows it."""

    section: str
    name: str
    type: str
    default: str
    description: str

    @property
    def full_name(self) -> str:
        """``section.key``."""
        return f"{self.section}.{self.name}"


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Names and models of the sections, in the order of the configuration."""
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type), f"{name} is a section"
        assert issubclass(field.annotation, BaseModel), f"{name} is a section"
        yield name, field.annotation


def keys_of(section: str, model: type[BaseModel]) -> Iterator[Key]:
    """Every key of a section."""
    docstrings = ModuleAnalyzer.for_module(model.__module__).find_attr_docs()
    for name, field in model.model_fields.items():
        written = " ".join(docstrings.get((model.__name__, name), [])).strip()
        yield Key(
            section=section,
            name=name,
            type=describe_type(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation),
            default=describe_default(field),
            description=(field.description or written).replace("``", "`"),
        )


def describe_type(annotation: Any, bounds: str = "") -> str:
    """A field's type in words: ``Annotated[int, Ge(1)] | None`` is ``integer ≥ 1, or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0], bounds + ",".join(_bounds(arguments[1:])))
    if origin is Literal:
        return " or ".join(_yaml(value) for value in arguments)
    if origin in (Union, types.UnionType):
        named = [describe_type(argument, bounds) for argument in arguments if argument is not type(None)]
        return ", or ".join([*named, *(["null"] if type(None) in arguments else [])])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"list of {describe_type(arguments[0])}{bounds}"
    if origin is tuple:
        return f"[{', '.join(describe_type(argument) for argument in arguments)}]"
    if origin is dict:
        return f"mapping of {describe_type(arguments[0])} to {describe_type(arguments[1])}"
    return f"{_PLAIN.get(annotation) or annotation.__name__}{bounds}"


def describe_default(field: FieldInfo) -> str:
    """A field's default as it is written in YAML."""
    return "required" if field.is_required() else _yaml(field.get_default(call_default_factory=True))


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for constraint in metadata:
        for name, sign in _BOUNDS.items():
            if (bound := getattr(constraint, name, None)) is not None:
                yield f" {sign} {bound:g}"


def _yaml(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, Enum) and value.isidentifier():
        return value
    return json.dumps(value, default=str)


def _target(name: str) -> str:
    return nodes.make_id(f"config-{name}")  # type: ignore[no-any-return]


class ConfigReference(SphinxDirective):
    """``{config-reference}``: every section, every key."""

    def run(self) -> list[nodes.Node]:
        """One section node per section of the configuration."""
        self.env.note_dependency(inspect.getfile(Config))
        return [self._section(name, model) for name, model in sections()]

    def _section(self, name: str, model: type[BaseModel]) -> nodes.Node:
        self.env.note_dependency(inspect.getfile(model))
        section = nodes.section(ids=[self._label(name)], names=[name])
        section += nodes.title(name, name)
        section += nodes.paragraph("", inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0].replace("``", "`"))
        table = nodes.table(classes=["config-reference"])
        group = nodes.tgroup(cols=len(_COLUMNS))
        group += [nodes.colspec(colwidth=width) for width in _COLUMNS.values()]
        head = nodes.thead()
        head += _row(*(nodes.paragraph("", title) for title in _COLUMNS))
        body = nodes.tbody()
        for key in keys_of(name, model):
            body += self._key_row(key)
        group += [head, body]
        table += group
        section += table
        return section

    def _key_row(self, key: Key) -> nodes.Node:
        named = nodes.paragraph("", "", nodes.literal(key.name, key.name), ids=[self._label(key.full_name)])
        default = nodes.paragraph("", "", nodes.literal(key.default, key.default))
        return _row(named, nodes.paragraph("", key.type), default, nodes.paragraph("", key.description))

    def _label(self, name: str) -> str:
        target = _target(name)
        domain = self.env.domains["std"]
        assert isinstance(domain, StandardDomain)
        domain.anonlabels[target] = (self.env.docname, target)
        domain.labels[target] = (self.env.docname, target, name)
        return target


def _row(*cells: nodes.Node) -> nodes.Node:
    row = nodes.row()
    row += [nodes.entry("", cell) for cell in cells]
    return row


class ConfigRole(SphinxRole):
    """``{config}`` with a section or key name between backquotes: a checked link into the reference."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """A reference to the section or key."""
        reference = addnodes.pending_xref(
            self.rawtext,
            nodes.literal(self.rawtext, self.text, classes=["xref"]),
            refdomain="std",
            reftype="ref",
            reftarget=_target(self.text),
            refexplicit=True,
            refwarn=True,
            refdoc=self.env.docname,
        )
        self.set_source_info(reference)
        return [reference], []


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive and the role."""
    app.add_directive("config-reference", ConfigReference)
    app.add_role("config", ConfigRole())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
