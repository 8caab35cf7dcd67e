"""Training from a file instead of from rollouts: the command line that every trainer offers.

options       the command line -> one frozen record
rows          a line of the data file, checked by itself
dataset       the file, indexed and read lazily
batches       which rows make which optimizer step
loop          steps, metrics, checkpoints; resumes where it was
run_dir       what lies in the output directory
backend       what a trainer wheel adds: a policy, its configuration and its ranks
"""

from dockyard_core.offline.backend import OfflineBackend, OfflineSession
from dockyard_core.offline.command import run_command

__all__ = ["OfflineBackend", "OfflineSession", "run_command"]
