"""`uv run apps/grpo`."""

import sys

from dockyard_grpo.cli import main

sys.exit(main())
