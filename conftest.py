"""Whole-repository test settings."""

import os
import sys

# Container images like to set this. The tests start dozens of interpreters that import heavy packages;
# without bytecode each of them would compile those packages again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
