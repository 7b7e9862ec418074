"""The columns of a train step, the columns that each stage reads, and checks of field names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dataplane import KVBatchMeta
from dataplane.core.schema import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    INPUT_LENGTHS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    SAMPLE_MASK,
    TOKEN_MASK,
)

STEP_FIELDS = (
    INPUT_IDS,
    INPUT_LENGTHS,
    TOKEN_MASK,
    SAMPLE_MASK,
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    ADVANTAGES,
)
"""Columns that `prepare_step` declares. Rollouts and stages can add others."""
FORWARD_FIELDS = frozenset(
    {
        INPUT_IDS,
        INPUT_LENGTHS,
        TOKEN_MASK,
        SAMPLE_MASK,
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "response_mask",
        "loss_mask",
    }
)
"""Columns that a forward pass for log-probs reads by default, if the meta has them."""
ROUTED_EXPERTS = "routed_experts"
"""Column that a forward pass with the policy's weights also reads if cfg's "router_replay" is enabled."""


def forward_fields(meta: KVBatchMeta, given: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """Return the fields that a forward pass reads: `given`, or by default the meta's fields in `known`. ValueError if
    no field is left."""
    if given is not None:
        require_meta(meta)
        return field_names("fields", given)
    fields = require_fields(meta)
    to_read = [name for name in fields if name in known]
    if not to_read:
        raise ValueError(
            f"none of this meta's fields ({', '.join(fields)}) is a default field of a forward pass "
            f"({', '.join(sorted(known))}): pass the fields to read, fields=[...]"
        )
    return to_read


def require_meta(meta: KVBatchMeta) -> KVBatchMeta:
    """Return `meta`. TypeError if it is not a `KVBatchMeta`."""
    if not isinstance(meta, KVBatchMeta):
        raise TypeError(
            f"expected a KVBatchMeta, got {type(meta).__name__}: pass the result of put_samples, list_samples or "
            "claim_meta of the data plane's client"
        )
    return meta


def require_fields(meta: KVBatchMeta) -> list[str]:
    """Return the fields that the meta names. ValueError if it names none."""
    fields = require_meta(meta).fields
    if not fields:
        raise ValueError("this meta names no fields for the workers to read: use meta.with_fields([...])")
    return list(fields)


def field_names(argument: str, given: Sequence[str]) -> list[str]:
    """Return the field names in `given` without duplicates. TypeError, naming `argument`, for other values."""
    if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
        raise TypeError(f"{argument}={given!r}: pass a list of field names")
    return list(dict.fromkeys(given))
