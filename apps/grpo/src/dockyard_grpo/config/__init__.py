"""Configuration: models, loading, dumping."""

from dockyard_grpo.config.loading import dump_config, load_config, uses_quickstart
from dockyard_grpo.config.model import Config

__all__ = ["Config", "dump_config", "load_config", "uses_quickstart"]
