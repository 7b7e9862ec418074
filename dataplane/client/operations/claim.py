"""Operations of consumer tasks: claims, what follows them, and why they wait.

Like `operations`, generators of steps; the docstrings of `DataPlaneClient` are their contracts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dataplane.client.operations.field_names import check_claim
from dataplane.client.operations.sample_names import meta_of, name_tuple, naming, samples_of, scalar
from dataplane.client.operations.steps import Operation, Post, Send
from dataplane.client.session_state import SessionState
from dataplane.core.durations import seconds, seconds_if_any
from dataplane.core.schema import DROPPED_SAMPLES
from dataplane.data.conditions import Where, conditions_of
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError, UnsupportedValueError
from dataplane.ledger import commands as c

Choice = TypeVar("Choice", bound=enum.StrEnum)


def claim(session_state: SessionState, command: c.Claim, dp_rank: int | None) -> Operation[KVBatchMeta]:
    """Wait on the service for the claim; the samples come with tags and, from `input_lengths`, sequence lengths."""
    yield from check_claim(session_state, command)
    claimed = yield Send(command)
    try:
        meta = meta_of(claimed.result, command.partition, task=command.task, fields=command.fields)
    except BaseException:
        yield Post(_undo(command, claimed.result))
        raise
    if dp_rank is not None:
        meta.extra_info["dp_rank"] = dp_rank
    if claimed.result.dropped:
        meta.extra_info[DROPPED_SAMPLES] = list(claimed.result.dropped)
    return meta


def _undo(command: c.Claim, claimed: c.Claimed) -> c.Nack:
    """What was claimed goes back, and nothing else."""
    samples = c.Samples(rows=claimed.rows, generations=claimed.generations)
    claims = np.full(len(claimed.rows), claimed.claim, np.int64)
    return c.Nack(partition=command.partition, task=command.task, samples=samples, claims=claims)


def claim_command(
    partition: str,
    task: str,
    required_fields: Sequence[str],
    batch_size: int,
    *,
    where: Where = (),
    order: str = "oldest",
    partial: str = "release",
    dp_rank: int | None = None,
    dp_world: int | None = None,
    step: int | None = None,
    timeout_s: float = 60.0,
    lease_s: float | None = None,
    partial_after_s: float | None = None,
    **more: Any,
) -> c.Claim:
    """The command of a claim, its predicates, order and times checked. A rank without the rest of a share is left
    out."""
    return c.Claim(
        partition=partition,
        task=task,
        fields=name_tuple("required_fields", required_fields),
        batch_size=batch_size,
        where=_predicates(where),
        order=_one_of(c.Order, "order", order),
        partial=_one_of(c.Partial, "partial", partial),
        dp_rank=None if dp_world is None and step is None else dp_rank,
        dp_world=dp_world,
        step=step,
        timeout_s=seconds("timeout_s", timeout_s),
        lease_s=seconds_if_any("lease_s", lease_s, positive=True),
        partial_after_s=seconds_if_any("partial_after_s", partial_after_s),
        **more,
    )


def _one_of(members: type[Choice], name: str, value: str) -> Choice:
    try:
        return members(value)
    except ValueError:
        raise InvalidRequestError(f"{name}={value!r}: expected one of {', '.join(members)}") from None


def _predicates(where: Where) -> tuple[c.Predicate, ...]:
    return tuple(_predicate(number, *condition) for number, condition in enumerate(conditions_of(where)))


def _predicate(number: int, tag: str, op: str, value: Any) -> c.Predicate:
    if op == "in":
        return c.Predicate(tag=tag, op=op, value=tuple(scalar(tag, row, item) for row, item in enumerate(value)))
    return c.Predicate(tag=tag, op=op, value=scalar(tag, number, value))


def about_claimed(
    session_state: SessionState, /, make: Callable[..., c.Command], meta: KVBatchMeta, **more: Any
) -> Operation[list[str]]:
    """Acknowledge, give back or extend what `meta` claimed; the ids of those samples that were cleared meanwhile."""
    if not isinstance(meta, KVBatchMeta):
        raise UnsupportedValueError(
            field="meta", row=None, got=type(meta).__name__, hint="Pass the KVBatchMeta that claim_meta returned."
        )
    if not meta.size:
        return []
    if meta.task_name is None or meta.claims is None:
        raise InvalidRequestError("this meta was not claimed by a task; pass what claim_meta returned, or a part of it")
    samples = samples_of(meta)
    command = make(partition=meta.partition_id, task=meta.task_name, samples=samples, claims=meta.claims, **more)
    settled = yield from naming(meta.sample_ids, command)
    return [meta.sample_ids[place] for place in settled.result.cleared.tolist()]


def extend(session_state: SessionState, meta: KVBatchMeta, lease_s: float) -> Operation[list[str]]:
    """Let the leases of what `meta` claimed end `lease_s` from now."""
    end_s = seconds("lease_s", lease_s, positive=True)
    return (yield from about_claimed(session_state, c.Extend, meta, lease_s=end_s))


def consumed(session_state: SessionState, partition: str, task_names: Sequence[str]) -> Operation[bool]:
    """Whether the partition is complete and the tasks have consumed all of it."""
    checked = yield Send(c.CheckConsumption(partition=partition, tasks=name_tuple("task_names", task_names)))
    return bool(checked.result.consumed)


def why_blocked(
    session_state: SessionState,
    /,
    partition: str,
    task: str,
    fields: Sequence[str],
    *,
    where: Where,
    **more: Any,
) -> Operation[c.Blocked]:
    """Why a claim would wait now."""
    command = c.WhyBlocked(
        partition=partition,
        task=task,
        fields=name_tuple("required_fields", fields),
        where=_predicates(where),
        **more,
    )
    return (yield Send(command)).result  # type: ignore[no-any-return]
