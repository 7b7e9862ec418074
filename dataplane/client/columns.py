"""Read and write the columns of a meta, for code that works with a client and batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from dataplane.core.schema import INPUT_LENGTHS, PAD_TO_MULTIPLE, TOKEN_ALIGNED_FIELDS, Layout
from dataplane.core.types import Scalar
from dataplane.data.batch import BatchedDataDict
from dataplane.data.columns import PerToken
from dataplane.data.jagged import as_lengths
from dataplane.data.meta import KVBatchMeta, require_meta
from dataplane.errors import InvalidRequestError


class ColumnClient(Protocol):
    """The methods of `DataPlaneClient` that these functions use. `put_samples` also accepts a meta instead of ids
    and then addresses samples by row handles."""

    def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        mode: str = "upsert",
    ) -> KVBatchMeta: ...

    def get_batch(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "padded",
        pad_value_dict: Mapping[str, Any] | None = None,
        pad_to_seqlen: int = 0,
        device: torch.device | str | None = None,
    ) -> BatchedDataDict[Any]: ...


def read_columns(
    client: ColumnClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    device: torch.device | str | None = None,
) -> BatchedDataDict[Any]:
    """Return the columns of the meta's samples in the form of `materialize`. Raise the errors of
    `client.get_batch`."""
    return client.get_batch(
        meta,
        select_fields,
        layout=layout,
        pad_value_dict=pad_value_dict,
        pad_to_seqlen=pad_to_seqlen,
        device=device,
    )


def write_columns(
    client: ColumnClient,
    meta: KVBatchMeta,
    fields: Mapping[str, Any],
    *,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> KVBatchMeta:
    """Write columns of the meta's samples, which must all exist (mode "update", by row handles if the meta has
    them). A write after a clear raises an error and creates no rows.

    Padded per-token tensors `[N, S, ...]` named in `token_aligned_fields` are cut row by row to the meta's
    `sequence_lengths`; ValueError if S is below the longest. A field that the partition's schema declares dense is
    stored uncut, and so are all fields if the sequence lengths are unknown. Return the meta of the put. Raise the
    errors of `client.put_samples`.
    """
    if require_meta(meta).sequence_lengths is not None:
        fields = PerToken.of(fields, meta.sequence_lengths, token_aligned_fields)
    return client.put_samples(meta, meta.partition_id, fields=fields, mode="update")


def kv_first_write(
    batch: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: ColumnClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Scalar]] | None = None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> KVBatchMeta:
    """Store a rollout batch as new samples (mode "create": existing ids raise ValueError).

    `batch["input_lengths"]` `[N]` is the token count of each sample. Padded per-token tensors named in
    `token_aligned_fields` are cut to it, unless the schema declares them dense, and each sample is tagged with
    `input_lengths`. All other columns are stored unchanged.

    Return the meta for `task_name` with `sequence_lengths`, tags, the written fields, and `extra_info`. A
    `pad_to_multiple` above 1 is added to `extra_info`: it rounds up the pad target of the forward pass. Raise
    ValueError if "input_lengths" is missing or does not match the batch, and the errors of `client.put_samples`.
    """
    if pad_to_multiple < 1:
        raise InvalidRequestError(f"pad_to_multiple={pad_to_multiple}: expected 1 or more")
    if INPUT_LENGTHS not in batch:
        raise InvalidRequestError(
            f"batch has no column {INPUT_LENGTHS!r}, the number of tokens of each sample; its columns are "
            f"{', '.join(sorted(batch)) or '(none)'}"
        )
    lengths = as_lengths(batch[INPUT_LENGTHS], rows=len(sample_ids))
    fields = PerToken.of(batch, lengths, token_aligned_fields)
    length_tags = [{INPUT_LENGTHS: length} for length in lengths.tolist()]
    meta = KVBatchMeta(
        partition_id=partition_id,
        task_name=task_name,
        sample_ids=list(sample_ids),
        fields=list(fields),
        sequence_lengths=lengths.tolist(),
        extra_info={**(extra_info or {}), **({PAD_TO_MULTIPLE: pad_to_multiple} if pad_to_multiple > 1 else {})},
        tags=[dict(tag) for tag in tags] if tags is not None else None,
    ).stamp_tags(length_tags)
    written = dp_client.put_samples(meta, partition_id, fields=fields, tags=meta.tags, mode="create")
    return meta if written.handles is None else meta.with_handles(*written.handles)
