"""``python -m dockyard_trainer_jax`` is ``dockyard-train-jax``."""

import sys

from dockyard_trainer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
