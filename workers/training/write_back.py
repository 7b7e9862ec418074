"""The write-back of one rank: checks of its result, and the put of whole rows. `TQWorkerMixin`
calls it on leaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dataplane import DataPlaneClient, KVBatchMeta, write_columns
from dataplane.core.schema import PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_ALIGNED_FIELDS
from dataplane.data.columns import require_fields
from dataplane.data.object_codec import describe_tensor, plain_tensor


def store_rows(client: DataPlaneClient, meta: KVBatchMeta, fields: Mapping[str, torch.Tensor], pad_length: int) -> None:
    """Store columns of the meta's samples. pad_length: of the batch, 0 for the longest sample;
    other padded columns of this width are per-token, too.

    TypeError for values other than ordinary tensors, ValueError for another number of rows. Errors
    of `write_columns`.
    """
    require_fields(fields)
    for name, value in fields.items():
        what = f"write-back of {name!r}"
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
        if value.is_meta or (not value.is_nested and plain_tensor(value) is None):
            raise TypeError(f"{what}: {describe_tensor(value)} cannot be stored")
        if value.dim() == 0 or value.size(0) != meta.size:
            nested = f"{value.size(0)} nested rows"
            got = nested if value.is_nested else f"shape {list(value.shape)}"
            raise ValueError(f"{what}: expected {meta.size} rows, one per sample of the meta, got {got}")
    width = pad_length or max(meta.sequence_lengths or [0])
    per_token = set(TOKEN_ALIGNED_FIELDS)
    for name, value in fields.items():
        if not value.is_nested and value.dim() > 1 and value.size(1) == width:  # [N, S, ...]
            per_token.add(name)
    write_columns(client, meta, fields, token_aligned_fields=per_token)


def result_field(meta: KVBatchMeta, result: Any, result_key: str, tq_field: str) -> dict[str, torch.Tensor]:
    """Return `result[result_key]` of a worker method as the field `tq_field`.

    TypeError if `result` is not a mapping or the value is not a tensor. KeyError if it lacks
    `result_key`. ValueError for log-probs without a token dimension. Each error names the key, the
    type and the shapes.
    """
    if not isinstance(result, Mapping):
        got = type(result).__name__
        raise TypeError(f"the method must return a mapping with {result_key!r}, got {got}")
    keys = [*result.keys()]
    if result_key not in keys:
        known = ", ".join(map(str, keys)) or "nothing"
        raise KeyError(f"the result has no {result_key!r}; it has {known}")
    value = result[result_key]
    what = f"result[{result_key!r}] (for {tq_field!r})"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
    logprobs = tq_field in (PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS)
    if logprobs and not value.is_nested and value.dim() < 2:
        raise ValueError(f"{what}: expected a per-token tensor [{meta.size}, S], got shape {list(value.shape)}")
    return {tq_field: value}
