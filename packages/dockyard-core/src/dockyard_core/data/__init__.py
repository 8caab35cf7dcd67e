"""Dataset rows -> tasks, and the order in which a run visits them. Private to the app."""

from dockyard_core.data.reader import dataset_fingerprint, read_tasks
from dockyard_core.data.sampler import TaskSampler

__all__ = ["TaskSampler", "dataset_fingerprint", "read_tasks"]
