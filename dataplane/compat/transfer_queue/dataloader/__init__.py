"""The data loader under the module names of the original package."""

from dataplane.compat.transfer_queue.streaming import StreamingDataLoader as StreamingDataLoader
from dataplane.compat.transfer_queue.streaming import StreamingDataset as StreamingDataset

__all__ = ["StreamingDataset", "StreamingDataLoader"]
