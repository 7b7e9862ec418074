"""Checkpoints: save partitions of a service to a directory and restore them into any service.

`save` and `restore` are operations of the client; `save` also has how a checkpoint gets to its path.
`manifest` describes the form of a checkpoint on disk.
"""

from dataplane.client.checkpoint.manifest import CheckpointInfo
from dataplane.client.checkpoint.restore import restore
from dataplane.client.checkpoint.save import checkpoint

__all__ = ["CheckpointInfo", "checkpoint", "restore"]
