"""The interface of the TransferQueue package (0.1.11) on this service. Write
`import dataplane.compat.transfer_queue as tq` instead of `import transfer_queue as tq`. docs/transfer_queue.md lists
the differences. "The original" in this package means TransferQueue 0.1.11."""

from dataplane.compat.transfer_queue.checkpoints import load_checkpoint as load_checkpoint
from dataplane.compat.transfer_queue.checkpoints import save_checkpoint as save_checkpoint
from dataplane.compat.transfer_queue.client import AsyncTransferQueueClient as AsyncTransferQueueClient
from dataplane.compat.transfer_queue.client import TransferQueueClient as TransferQueueClient
from dataplane.compat.transfer_queue.errors import FetchTimeoutError as FetchTimeoutError
from dataplane.compat.transfer_queue.errors import NotInitializedError as NotInitializedError
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError as StorageKeyNotFoundError
from dataplane.compat.transfer_queue.errors import TransferQueueError as TransferQueueError
from dataplane.compat.transfer_queue.interface import async_kv_batch_get as async_kv_batch_get
from dataplane.compat.transfer_queue.interface import async_kv_batch_get_by_meta as async_kv_batch_get_by_meta
from dataplane.compat.transfer_queue.interface import async_kv_batch_put as async_kv_batch_put
from dataplane.compat.transfer_queue.interface import async_kv_clear as async_kv_clear
from dataplane.compat.transfer_queue.interface import async_kv_list as async_kv_list
from dataplane.compat.transfer_queue.interface import async_kv_put as async_kv_put
from dataplane.compat.transfer_queue.interface import kv_batch_get as kv_batch_get
from dataplane.compat.transfer_queue.interface import kv_batch_get_by_meta as kv_batch_get_by_meta
from dataplane.compat.transfer_queue.interface import kv_batch_put as kv_batch_put
from dataplane.compat.transfer_queue.interface import kv_clear as kv_clear
from dataplane.compat.transfer_queue.interface import kv_list as kv_list
from dataplane.compat.transfer_queue.interface import kv_put as kv_put
from dataplane.compat.transfer_queue.keyed import KVBatchMeta as KVBatchMeta
from dataplane.compat.transfer_queue.metadata import BatchMeta as BatchMeta
from dataplane.compat.transfer_queue.samplers import BaseSampler as BaseSampler
from dataplane.compat.transfer_queue.samplers import GRPOGroupNSampler as GRPOGroupNSampler
from dataplane.compat.transfer_queue.samplers import RankAwareSampler as RankAwareSampler
from dataplane.compat.transfer_queue.samplers import SeqlenBalancedSampler as SeqlenBalancedSampler
from dataplane.compat.transfer_queue.samplers import SequentialSampler as SequentialSampler
from dataplane.compat.transfer_queue.session import close as close
from dataplane.compat.transfer_queue.session import get_client as get_client
from dataplane.compat.transfer_queue.session import get_metrics_endpoint as get_metrics_endpoint
from dataplane.compat.transfer_queue.session import init as init
from dataplane.compat.transfer_queue.streaming import StreamingDataLoader as StreamingDataLoader
from dataplane.compat.transfer_queue.streaming import StreamingDataset as StreamingDataset

__version__ = "0.1.11"
"""The version of TransferQueue whose interface this is, for callers that check it."""

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "FetchTimeoutError",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "NotInitializedError",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "TransferQueueError",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
