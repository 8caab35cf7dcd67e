"""`python -m dockyard_grpo`."""

import sys

from dockyard_grpo.cli import main

sys.exit(main())
