"""The interface of the TransferQueue package (0.1.11) on this service. Write
`import dataplane.compat.transfer_queue as tq` instead of `import transfer_queue as tq`. docs/transfer_queue.md lists
the differences. "The original" in this package means TransferQueue 0.1.11."""

from __future__ import annotations

import sys

from dataplane.compat.transfer_queue import dataloader, sampler, utils
from dataplane.compat.transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient
from dataplane.compat.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from dataplane.compat.transfer_queue.errors import (
    FetchTimeoutError,
    NotInitializedError,
    StorageKeyNotFoundError,
    TransferQueueError,
)
from dataplane.compat.transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from dataplane.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta
from dataplane.compat.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from dataplane.compat.transfer_queue.session import close, get_client, get_metrics_endpoint, init

__version__ = "0.1.11"
"""The version of TransferQueue whose interface this is, for callers that check it."""

_MODULES = {
    "dataloader.streaming_dataloader": dataloader,
    "dataloader.streaming_dataset": dataloader,
    "sampler.base": sampler,
    "sampler.grpo_group_n_sampler": sampler,
    "sampler.rank_aware_sampler": sampler,
    "sampler.seqlen_balanced_sampler": sampler,
    "sampler.sequential_sampler": sampler,
    "utils.enum_utils": utils,
    "utils.logging_utils": utils,
}
"""Submodules of the original that its users import, with the module that has their names."""

for _path, _module in _MODULES.items():
    sys.modules[f"{__name__}.{_path}"] = _module
    setattr(_module, _path.partition(".")[2], _module)
    vars(_module)["__path__"] = []  # so that Python imports the submodules of these modules

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
