"""Batches for torch's `DataLoader`, fetched by the data-parallel rank and split into micro-batches."""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dataplane.compat.transfer_queue.client import TransferQueueClient
from dataplane.compat.transfer_queue.columns import packed_rows
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.errors import DataPlaneError

Batch = tuple[TensorDict, BatchMeta]

PAUSE_S = 0.1
"""Interval between two polls for samples, if the service does not wait (`polling_mode`).

A blocking claim cannot replace the polls. The next event can be a batch that another process of this rank drew, the
last claim of another rank (`check_consumption_status`), samples too few for the sampler (no complete group), or any
condition of a custom `fetch_batch_fn`. The original polls every second.
"""


class StreamingDataset(IterableDataset[Batch]):
    """The micro-batches of a rank, with their metas. Batches of `batch_size` are fetched as they become ready, kept in
    `buffer` and split into `micro_batch_size`.

    config: the result of `init()`, for its `controller.zmq_info`. Processes with the same `dp_rank` get the same
    batches (with a `RankAwareSampler`). The iteration is endless; with `should_check_consumption_status` it ends when
    the task has claimed all samples of the partition and this rank has returned its share. fetch_batch_fn and
    process_batch_fn replace `default_fetch_batch_fn` and `chunk_batch_fn`. The service must be in `polling_mode`.
    ValueError for a `micro_batch_size` below 1, no fields or a negative rank.

    batch_index: number of the next batch, in `buffer` and for the sampler. Returned batches stay in `buffer`, for
    `reset`. sampling_config: that of every fetch. _client: created by the first iteration.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1 or not data_fields or dp_rank < 0:
            raise ValueError(
                f"micro_batch_size={micro_batch_size}, data_fields={data_fields}, dp_rank={dp_rank}: expected at least "
                "1, at least one field, and at least 0"
            )
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Batch] = []
        self.batch_index = 0
        self._client: TransferQueueClient | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of the batches in the buffer from `batch_index` on, then of batches fetched anew."""
        if self._client is None:
            controller_info = self.config["controller"]["zmq_info"]
            self._client = TransferQueueClient(f"StreamingDataset_{uuid.uuid4().hex[:8]}", controller_info)
            weakref.finalize(self, _close_client, self._client)  # when nothing refers to this dataset any longer
        while True:
            if self.batch_index < len(self.buffer) or self._fetch_batch(self._client):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
            elif self._is_consumed(self._client):
                return
            else:
                time.sleep(PAUSE_S)

    def _fetch_batch(self, client: TransferQueueClient) -> bool:
        """Fetch one batch into `buffer`. Return False if none is ready."""
        data, meta = self.fetch_batch_fn(
            tq_client=client,
            data_fields=self.data_fields,
            batch_size=self.batch_size,
            partition_id=self.partition_id,
            task_name=self.task_name,
            sampling_config=self.sampling_config,
            batch_index=self.batch_index,
        )
        if data is None:
            return False
        self.buffer.append((data, meta))
        return True

    def _is_consumed(self, client: TransferQueueClient) -> bool:
        """Whether the iteration ends because the task has claimed all samples. Always False without
        `should_check_consumption_status`."""
        return self.should_check_consumption_status and client.check_consumption_status(
            self.task_name, self.partition_id
        )

    def reset(self) -> None:
        """Restart the iteration with the batches in the buffer."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Switch to another partition, with an empty buffer."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


class StreamingDataLoader(DataLoader[Batch]):
    """A `DataLoader` of a `StreamingDataset`. The dataset makes the batches, which are returned unchanged unless
    `collate_fn` is given."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _unchanged,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self.dataset: StreamingDataset

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """Return the batches fetched so far."""
        return self.dataset.buffer


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Return the batch (None if it is not ready) and the meta of this rank for `batch_index`."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name, sampling_config=config)
    return (tq_client.get_data(meta) if meta else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Split the batch into parts of `micro_batch_size` rows, each with its meta. The last part can be smaller.
    TypeError unless `td` is a TensorDict, ValueError if it has no batch dimension, or for a size that is not a positive
    integer or exceeds the rows."""
    if not isinstance(td, TensorDict):
        raise TypeError(f"chunk_batch_fn: expected a TensorDict, got {type(td).__name__}")
    if not td.batch_size:
        raise ValueError(
            "chunk_batch_fn: the TensorDict has no batch dimension (batch_size=[]); create it with batch_size=[N]"
        )
    if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size!r}: expected an integer of 1 or more")
    rows = int(td.batch_size[0])
    if micro_batch_size > rows:
        raise ValueError(
            f"micro_batch_size={micro_batch_size}: expected at most {rows}, the number of rows of the batch"
        )
    # A nested tensor cannot be sliced: split it into rows, and join the rows of each part.
    nested = {name: value.unbind() for name, value in td.items() if isinstance(value, Tensor) and value.is_nested}
    plain = td.exclude(*nested)
    batches = []
    for start in range(0, rows, micro_batch_size):
        end = min(start + micro_batch_size, rows)
        batch = plain[start:end]
        for name, field_rows in nested.items():
            batch.set(name, packed_rows(field_rows[start:end]))
        batches.append((batch, batch_meta[start:end]))
    return batches


def _close_client(client: TransferQueueClient) -> None:
    with contextlib.suppress(DataPlaneError):  # the service can end before the iterating process
        client.close()


def _unchanged(batch: Any) -> Any:
    return batch
