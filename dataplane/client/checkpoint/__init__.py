"""Checkpoints: save partitions of a service to a directory and restore them into any service.

`save` and `restore` are operations of the client. `manifest` describes the contents of a checkpoint, `files` its
data files, `atomic_dir` how a checkpoint appears at its path atomically.
"""

from dataplane.client.checkpoint.manifest import CheckpointInfo
from dataplane.client.checkpoint.restore import restore
from dataplane.client.checkpoint.save import checkpoint

__all__ = ["CheckpointInfo", "checkpoint", "restore"]
