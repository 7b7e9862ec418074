"""`StreamingDataset` under the module name of the original package."""

from dataplane.compat.transfer_queue.streaming import StreamingDataset as StreamingDataset
from dataplane.compat.transfer_queue.streaming import chunk_batch_fn as chunk_batch_fn
from dataplane.compat.transfer_queue.streaming import default_fetch_batch_fn as default_fetch_batch_fn
