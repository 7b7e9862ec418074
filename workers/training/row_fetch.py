"""The fetch of one rank: its samples, its part of their rows, and the form of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from dataplane import BatchedDataDict, ContextParallel, DataPlaneClient, KVBatchMeta, materialize
from dataplane.core.schema import GLOBAL_FORWARD_PAD_SEQLEN, Layout
from dataplane.data.row_parts import Inner, RowParts, Tokens, row_parts
from dataplane.errors import InvalidRequestError
from workers.training.replica_fetch import FetchedPart


@dataclass(frozen=True, kw_only=True)
class RowFetch:
    """A fetch of the fields of `meta`. client, leads, pad_values and pad_length are called when needed, because their
    errors are then raised on all siblings. pad_length: 0 pads to this rank's longest row. tokens, inner: see
    `DataPlaneClient.get_batch`. device: of the columns that a leader reads for its siblings."""

    client: Callable[[], DataPlaneClient]
    leads: Callable[[], bool]
    meta: KVBatchMeta
    layout: Layout
    pad_values: Callable[[], Mapping[str, Any]]
    pad_length: Callable[[], int]
    preprocess: Callable[[BatchedDataDict[Any]], BatchedDataDict[Any]] | None
    tokens: Tokens | None
    inner: Inner | None
    device: torch.device | None = None

    def part(self) -> FetchedPart:
        """Return this rank's part in a fetch through its replica group."""
        return FetchedPart(
            leads=self.leads,
            digest=lambda: meta_digest(self.meta, f"{self.layout} {self.pad_length()}"),
            read=self._read,
            wanted=lambda: encoded(self._parts()),
        )

    def alone(self) -> BatchedDataDict[Any]:
        """Return the batch, read by this rank itself."""
        batch = self.client().get_batch(
            self.meta,
            layout=self.layout,
            pad_value_dict=self.pad_values(),
            pad_to_seqlen=self.pad_length() if self.tokens is None else 0,
            tokens=self._cut(),
            inner=self.inner,
        )
        return batch if self.preprocess is None else self.preprocess(batch)

    def finish(self, columns: Mapping[str, Any]) -> BatchedDataDict[Any]:
        """Return the batch of the jagged columns that the leader has sent."""
        parts, lengths = self._parts(), self.meta.sequence_lengths
        batch = materialize(
            columns,
            self.layout,
            pad_value_dict=self.pad_values(),
            pad_to_seqlen=self.pad_length() if parts is None or self.tokens is None else parts.width,
            sequence_lengths=lengths if parts is None or lengths is None else parts.lengths(lengths),
        )
        return batch if self.preprocess is None else self.preprocess(batch)

    def _read(self, wanted: bytes) -> Mapping[str, Any]:
        """Return the jagged columns of the part that a sibling wants; each rank pads, see `finish`."""
        return self.client().get_batch(self.meta, layout="jagged", device=self.device, **arguments(wanted))

    def _cut(self) -> Tokens | None:
        return cut_like_fetched(self.tokens, self.layout, self.pad_length, self.meta)

    def _parts(self) -> RowParts | None:
        """Return this rank's part; None: whole rows."""
        return row_parts(self._cut(), self.inner, self.meta.size, self.meta.fields or ())


def cut_like_fetched(
    tokens: Tokens | None, layout: Layout, pad_length: Callable[[], int], meta: KVBatchMeta
) -> Tokens | None:
    """Return the token ranges of a batch of this layout: a context-parallel rank cuts padded rows at the pad length.
    InvalidRequestError if the pad length that the driver has set does not fit."""
    if not isinstance(tokens, ContextParallel) or tokens.pad_to or layout != "padded":
        return tokens
    length = pad_length()
    try:
        cut = replace(tokens, pad_to=length)
        cut.ranges(np.array(meta.sequence_lengths or [], np.int64))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{GLOBAL_FORWARD_PAD_SEQLEN}={length}, which the driver has set in the meta, cannot be the pad_to of "
            f"{tokens}: {error}. Let the driver set a larger one or round it up (pad_to_multiple), or pass a pad_to, "
            "or dp_aligned_seq_len=False"
        ) from error
    return cut


class _Wanted(msgspec.Struct, frozen=True, array_like=True):
    """An encoded `RowParts`. ranges: int64 starts and stops as bytes; rank: rank, size, zigzag and pad_to; slices:
    start, stop and step of each slice, by field."""

    ranges: bytes | None
    rank: tuple[int, int, bool, int] | None
    slices: dict[str, list[tuple[int | None, int | None, int | None]]]


def encoded(parts: RowParts | None) -> bytes:
    """Encode the part of the rows that a rank wants; equal parts have equal bytes. b"": whole rows."""
    if parts is None:
        return b""
    ranges, rank = None, None
    if isinstance(parts.ranges, ContextParallel):
        rank = (parts.ranges.rank, parts.ranges.size, parts.ranges.zigzag, parts.ranges.pad_to)
    elif parts.ranges is not None:
        ranges = parts.ranges.tobytes()
    slices = {
        name: [(each.start, each.stop, each.step) for each in parts.slices[name]] for name in sorted(parts.slices)
    }
    return msgspec.msgpack.encode(_Wanted(ranges, rank, slices))


def arguments(wanted: bytes) -> dict[str, Any]:
    """Return the arguments of `get_batch` for an encoded part."""
    if not wanted:
        return {}
    part = msgspec.msgpack.decode(wanted, type=_Wanted)
    tokens: Any = None
    if part.rank is not None:
        rank, size, zigzag, pad_to = part.rank
        tokens = ContextParallel(rank=rank, size=size, zigzag=zigzag, pad_to=pad_to)
    elif part.ranges is not None:
        tokens = np.frombuffer(part.ranges, np.int64).reshape(-1, 2)
    return {
        "tokens": tokens,
        "inner": {name: [slice(*each) for each in slices] for name, slices in part.slices.items()},
    }


def meta_digest(meta: KVBatchMeta, form: str) -> bytes:
    """Return a digest of 16 bytes, equal for metas with the same samples (generations included) and fields, and for an
    equal `form`: layout and pad length of the batch."""
    digest = hashlib.blake2b(digest_size=16)
    # Each text is preceded by its length, and "" separates fields from samples: different lists give different bytes.
    for part in (meta.partition_id, form, *(meta.fields or ()), "", *meta.sample_ids):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    for array in meta.handles or ():
        digest.update(array.tobytes())
    return digest.digest()
