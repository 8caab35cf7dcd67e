"""Writes the configuration reference from the models that validate it, so that nothing about a key is typed by hand.

``{config-reference}`` becomes one section and one table per section of the configuration, with what
``uv run apps/grpo config --explain`` says of each key. ``{config}`` is a role that links to a section or a key by its
name; a name that does not exist is a warning, like any broken reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from docutils import nodes  # type: ignore[import-untyped]
from pydantic import BaseModel
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.std import StandardDomain
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.typing import ExtensionMetadata

from dockyard_grpo.config import Config
from dockyard_grpo.config.listing import Key, list_keys
from dockyard_grpo.config.loading import read_layers, validate

_COLUMNS = {"key": 25, "type": 20, "default": 15, "description": 40}
# The only two keys without a usable default; every other value is one.
_REQUIRED = ("policy.model=DIR", "data.train=TASKS.jsonl")


def sections() -> Iterator[tuple[str, type[BaseModel], list[Key]]]:
    """Name, model and keys of each section, in the order of the configuration."""
    layers = read_layers(None, _REQUIRED)
    keys = list_keys(validate(layers), layers)
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type), f"{name} is a section"
        assert issubclass(field.annotation, BaseModel), f"{name} is a section"
        yield name, field.annotation, [key for key in keys if key.name.startswith(f"{name}.")]


def _target(name: str) -> str:
    return nodes.make_id(f"config-{name}")  # type: ignore[no-any-return]


class ConfigReference(SphinxDirective):
    """``{config-reference}``: every section, every key."""

    def run(self) -> list[nodes.Node]:
        """One section node per section of the configuration."""
        return [self._section(name, model, keys) for name, model, keys in sections()]

    def _section(self, name: str, model: type[BaseModel], keys: list[Key]) -> nodes.Node:
        self.env.note_dependency(inspect.getfile(model))
        section = nodes.section(ids=[self._label(name)], names=[name])
        section += nodes.title(name, name)
        section += nodes.paragraph("", inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0])
        table = nodes.table(classes=["config-reference"])
        group = nodes.tgroup(cols=len(_COLUMNS))
        group += [nodes.colspec(colwidth=width) for width in _COLUMNS.values()]
        head = nodes.thead()
        head += _row(*(nodes.paragraph("", title) for title in _COLUMNS))
        body = nodes.tbody()
        for key in keys:
            body += self._key_row(key, key.name.removeprefix(f"{name}."))
        group += [head, body]
        table += group
        section += table
        return section

    def _key_row(self, key: Key, short_name: str) -> nodes.Node:
        named = nodes.paragraph("", "", nodes.literal(short_name, short_name), ids=[self._label(key.name)])
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
