"""One stream of micro-batches for a replica group: the leader claims, reads and broadcasts them to its siblings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dataplane.data.batch import BatchedDataDict
from dataplane.data.meta import KVBatchMeta
from dataplane.training.data_loader import Form, MicroBatch, Take
from workers.training.replica_fetch import FetchedPart, ReplicaGroup

_META = "\0meta"
"""Name of the column that transports the meta, as one object."""


class SharedStream:
    """A stream's `Replicas`. Each micro-batch is one `ReplicaGroup.fetch`, made when a rank requests the next one.

    leads: whether this rank claims. digest: 16 bytes, equal for equal arguments of the streams. replicas: its timeout
    covers the leader's wait for a micro-batch.
    """

    def __init__(self, replicas: ReplicaGroup, *, leads: bool, digest: bytes) -> None:
        self._replicas = replicas
        self._leads = leads
        self._digest = digest

    @property
    def leads(self) -> bool:
        return self._leads

    @property
    def device(self) -> torch.device | None:
        return self._replicas.gpu

    def share(self, take: Take, form: Form) -> MicroBatch | None:
        """Return the next micro-batch on every rank, or None at the end of the stream. The leader calls `take`; every
        rank calls `form` on the columns. See `dataplane.training.data_loader.Replicas`.

        This makes collective calls: use the same thread and the same order as for all others on the replica group.
        Raises the errors of `ReplicaGroup.fetch`.
        """

        def read(_: bytes) -> Mapping[str, Any]:
            """Return the columns of the next micro-batch with its meta; nothing at the end. Runs on the leader."""
            micro_batch = take()
            return {} if micro_batch is None else {**micro_batch.data, _META: [_to_plain(micro_batch.meta)]}

        def finish(columns: BatchedDataDict[Any]) -> MicroBatch | None:
            """Make the micro-batch from the columns that the leader has read. Runs on every rank."""
            if _META not in columns:
                return None
            meta = _from_plain(columns.pop(_META)[0])
            return MicroBatch(form(columns, meta), meta)

        part = FetchedPart(leads=lambda: self._leads, digest=lambda: self._digest, read=read)
        return self._replicas.fetch(part, "leader_broadcast", finish)


def _to_plain(meta: KVBatchMeta) -> dict[str, Any]:
    """Convert a meta to values that the object codec supports."""
    return {
        "partition_id": meta.partition_id,
        "task_name": meta.task_name,
        "sample_ids": list(meta.sample_ids),
        "fields": meta.fields,
        "sequence_lengths": None if meta.sequence_lengths is None else list(meta.sequence_lengths),
        "extra_info": meta.extra_info,
        "tags": None if meta.tags is None else list(meta.tags),
        "handles": meta.handles,
        "claims": meta.claims,
    }


def _from_plain(plain: dict[str, Any]) -> KVBatchMeta:
    """Return the meta that `_to_plain` converted. Modifies `plain`."""
    handles, claims = plain.pop("handles"), plain.pop("claims")
    meta = KVBatchMeta(**plain)
    meta = meta if handles is None else meta.with_handles(*handles)
    return meta if claims is None else meta.with_claims(claims)
