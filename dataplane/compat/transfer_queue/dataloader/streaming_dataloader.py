"""`StreamingDataLoader` under the module name of the original package."""

from dataplane.compat.transfer_queue.streaming import StreamingDataLoader as StreamingDataLoader
