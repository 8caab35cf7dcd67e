"""``python -m dockyard_trainer_torch`` is ``dockyard-train-torch``."""

import sys

from dockyard_trainer_torch.cli import main

if __name__ == "__main__":
    sys.exit(main())
