"""``python -m dockyard_inference.push``."""

from dockyard_inference.push.cli import main

raise SystemExit(main())
