"""Which columns a step has, which of them each of its stages reads, and how a caller names them."""

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
"""Columns that `prepare_step` declares; rollouts and stages may add others."""
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
"""Columns that a forward pass for log-probs reads unless it is told which: of those of the meta, these."""
ROUTED_EXPERTS = "routed_experts"
"""What a forward pass with the policy's weights reads besides where cfg's "router_replay" is enabled."""


def forward_fields(meta: KVBatchMeta, given: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """The fields that a forward pass reads: those given, else of the meta's those in `known`."""
    if given is not None:
        a_meta(meta)
        return field_names("fields", given)
    fields = fields_of(meta)
    found = [name for name in fields if name in known]
    if not found:
        raise ValueError(
            f"of this meta's fields ({', '.join(fields)}) none is one that a forward pass is known to read "
            f"({', '.join(sorted(known))}): name those that it reads, fields=[...]"
        )
    return found


def a_meta(meta: KVBatchMeta) -> KVBatchMeta:
    """`meta` itself; TypeError if it is none."""
    if not isinstance(meta, KVBatchMeta):
        raise TypeError(
            f"expected a KVBatchMeta, got {type(meta).__name__}: pass what put_samples, list_samples or claim_meta "
            "of the data plane's client returned"
        )
    return meta


def fields_of(meta: KVBatchMeta) -> list[str]:
    """The fields that the meta names; ValueError if it names none."""
    fields = a_meta(meta).fields
    if not fields:
        raise ValueError("this meta does not say which fields the workers are to read: use meta.with_fields([...])")
    return list(fields)


def field_names(argument: str, given: Sequence[str]) -> list[str]:
    """Names of fields, given as the argument `argument`, each once."""
    if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
        raise TypeError(f"{argument}={given!r}: pass a list of names of fields")
    return list(dict.fromkeys(given))
