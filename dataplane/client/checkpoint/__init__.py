"""Checkpoints: partitions of a service in a directory, and back into any service.

`save` and `restore` are operations of the client; `manifest` is what a checkpoint says of itself, `files` its
bytes, `atomic_dir` how they come to be at their path whole or not at all.
"""

from dataplane.client.checkpoint.manifest import CheckpointInfo
from dataplane.client.checkpoint.restore import restore
from dataplane.client.checkpoint.save import checkpoint

__all__ = ["CheckpointInfo", "checkpoint", "restore"]
