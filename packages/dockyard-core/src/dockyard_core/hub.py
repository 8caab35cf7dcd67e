"""Where the files of a model lie: a directory, or the cache of a model hub.

The wheels that load models need huggingface_hub, which is imported for an id only.
"""

from __future__ import annotations

from pathlib import Path

from dockyard_core.errors import ConfigError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model_dir(model: str | Path) -> Path:
    """Return the local directory of ``model``: a directory, or a hub id in or for the hub's cache.

    Raises ConfigError when there is no such directory and it cannot be a hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    looks_like_path = path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1
    if looks_like_path or path.exists():
        raise ConfigError(
            f"policy.model must be a directory with config.json and *.safetensors, got {str(model)!r}; "
            "check the path, or give a hub id such as 'owner/name'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"policy.model is neither a directory nor a model the hub serves, got {str(model)!r} "
            f"({type(error).__name__}); check the path or the network"
        ) from error
