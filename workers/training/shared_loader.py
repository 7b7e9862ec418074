"""One stream of micro-batches for a whole replica group: the leader claims and reads, its siblings get a broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane.data.batch import BatchedDataDict
from dataplane.data.meta import KVBatchMeta
from dataplane.training.data_loader import Form, MicroBatch, Take
from workers.training.replica_fetch import FetchedPart, ReplicaGroup

_META = "\0meta"
"""The column that brings the meta: one object."""


class SharedStream:
    """A stream's `Replicas`: each micro-batch is one `ReplicaGroup.fetch`, made where a rank asks for the next.

    leads: whether this rank claims. digest: 16 bytes that are equal where the streams' arguments are. replicas: its
    timeout covers the leader's wait for a micro-batch.
    """

    def __init__(self, replicas: ReplicaGroup, *, leads: bool, digest: bytes) -> None:
        self._replicas = replicas
        self._leads = leads
        self._digest = digest

    @property
    def leads(self) -> bool:
        return self._leads

    def share(self, take: Take, form: Form) -> MicroBatch | None:
        """See `dataplane.training.data_loader.Replicas`. Collective calls: in the thread, and in the order, of all
        others on the replica group. Raises as `ReplicaGroup.fetch` does."""

        def read() -> Mapping[str, Any]:
            taken = take()
            return {} if taken is None else {**taken.data, _META: [_plain(taken.meta)]}

        def finish(columns: BatchedDataDict[Any]) -> MicroBatch | None:
            if _META not in columns:
                return None
            meta = _meta(columns.pop(_META)[0])
            return MicroBatch(form(columns, meta), meta)

        part = FetchedPart(leads=lambda: self._leads, digest=lambda: self._digest, read=read)
        return self._replicas.fetch(part, "leader_broadcast", finish)


def _plain(meta: KVBatchMeta) -> dict[str, Any]:
    """A meta as values that the object codec takes."""
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


def _meta(plain: dict[str, Any]) -> KVBatchMeta:
    handles, claims = plain.pop("handles"), plain.pop("claims")
    meta = KVBatchMeta(**plain)
    meta = meta if handles is None else meta.with_handles(*handles)
    return meta if claims is None else meta.with_claims(claims)
