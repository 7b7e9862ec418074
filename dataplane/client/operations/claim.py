"""Operations of consumer tasks: claims, the acknowledgement or release of claimed samples, and the reasons why
claims wait.

They are generators of steps, like all `operations`; the docstrings of `DataPlaneClient` are their contracts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np

from dataplane.client.operations.field_names import check_claim
from dataplane.client.operations.sample_names import meta_of, samples_of, scalar, send_for_samples
from dataplane.client.operations.steps import Operation, Post, Send
from dataplane.client.session_state import SessionState
from dataplane.core.durations import as_timeout, seconds, seconds_if_any
from dataplane.core.schema import DROPPED_SAMPLES
from dataplane.data.conditions import Where, conditions_of
from dataplane.data.meta import KVBatchMeta, list_of_names, name_of, require_meta
from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c

Choice = TypeVar("Choice", bound=enum.StrEnum)


class ClaimConditions(TypedDict, total=False):
    """Conditions on the samples of a claim.

    where: conditions on tags: a text such as "reward > 0.5", or a list of such texts or (tag, operator, value),
    with the operators == != < <= > >= in. group_size: claim whole groups only, i.e. samples with equal tag
    `group_by` (default: "group").

    max_lag: claim only samples whose tag `version_tag` (default: "weight_version") is at least the partition's
    version (`set_version`) minus `max_lag`. The version is read at every evaluation of the claim, so that a waiting
    claim follows the trainer. Samples that are too old are skipped and do not delay the tail of a partition; a
    sample without the tag may still receive it.
    """

    where: Where
    group_by: str
    group_size: int | None
    max_lag: int | None
    version_tag: str


class ClaimOptions(ClaimConditions, total=False):
    """`ClaimConditions`, and options for the selection of samples.

    min_batch_size: number of ready samples that ends the wait (default: `batch_size`). order: "oldest" (the
    default) or "freshest". lease_s: samples that are not acknowledged with `ack` (or cleared) within this time may
    be claimed again.

    partial_after_s: timeout of incomplete groups, for example after a producer failed or a field was never written.
    It starts when the oldest unclaimed sample of the group was put (by the service's clock) and applies while fewer
    than `group_size` of its samples are ready. With partial="release" (the default) the ready samples are then
    claimed like a whole group (`batch_size` counts groups in this case, and the meta is shorter). With
    partial="drop" the group is cleared for all tasks: the ids dropped since the task's last claim are
    `extra_info["dropped_samples"]`, and their number is in `stats()`. At the tail of a complete partition, claims
    wait for this timeout. Groups whose samples all fail `where` or `max_lag` are ignored.

    sampler: how the selection is made and divided between ranks: "sequential" (in order; rank 0 gets the first
    samples), "group-n" (the same with whole groups), "length-balanced" (about equal sums of the tag `input_lengths`
    per rank; in order if a sample lacks the tag), "rank-aware" (round-robin over the ranks). None:
    "length-balanced" for shares, else "group-n" with `group_size`, else "sequential".
    """

    min_batch_size: int | None
    order: str
    lease_s: float | None
    partial_after_s: float | None
    partial: str
    sampler: str | None


def convert_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options and return them as fields of the command (see `_FIELDS`). Raise TypeError for an option that
    `kind`, a TypedDict, does not have."""
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"unexpected option {name!r}: the options are {', '.join(kind.__annotations__)}")
    return {name: _FIELDS[name](value) if name in _FIELDS else value for name, value in options.items()}


def claim(session_state: SessionState, command: c.Claim, dp_rank: int | None) -> Operation[KVBatchMeta]:
    """Wait on the service for the claim and return the claimed samples, with tags and, from `input_lengths`, sequence
    lengths. `extra_info` names the caller's rank, unless `dp_rank` is None, and the samples of dropped groups."""
    yield from check_claim(session_state, command)
    claimed = yield Send(command)
    try:
        meta = meta_of(claimed.result, command.partition, task=command.task, fields=command.fields)
    except BaseException:  # an interrupt, for example: the caller never sees these samples
        yield Post(_undo(command, claimed.result))
        raise
    if dp_rank is not None:
        meta.extra_info["dp_rank"] = dp_rank
    if claimed.result.dropped:
        meta.extra_info[DROPPED_SAMPLES] = list(claimed.result.dropped)
    return meta


def _undo(command: c.Claim, claimed: c.Claimed) -> c.Nack:
    """Return the command that releases exactly the samples of this claim."""
    samples = c.Samples(rows=claimed.rows, generations=claimed.generations)
    claims = np.full(len(claimed.rows), claimed.claim, np.int64)
    return c.Nack(partition=command.partition, task=command.task, samples=samples, claims=claims)


def claim_command(
    partition: str,
    task: str,
    required_fields: Sequence[str],
    batch_size: int,
    *,
    dp_rank: int | None = None,
    dp_world: int | None = None,
    step: int | None = None,
    blocking: bool = True,
    timeout_s: float | None = 60.0,
    **options: Unpack[ClaimOptions],
) -> c.Claim:
    """Return the command of a claim, with checked options. Without `dp_world` and `step` the claim is not divided
    among ranks, and `dp_rank` is left out."""
    return c.Claim(
        partition=name_of("partition_id", partition),
        task=name_of("task_name", task),
        fields=tuple(list_of_names("required_fields", required_fields)),
        batch_size=batch_size,
        dp_rank=None if dp_world is None and step is None else dp_rank,
        dp_world=dp_world,
        step=step,
        blocking=blocking,
        timeout_s=as_timeout("timeout_s", timeout_s),
        **convert_options(ClaimOptions, options),
    )


def _one_of(members: type[Choice], name: str, value: str) -> Choice:
    """Return the member with this value. Raise `InvalidRequestError` for any other value of the option `name`."""
    try:
        return members(value)
    except ValueError:
        raise InvalidRequestError(f"{name}={value!r}: expected one of {', '.join(members)}") from None


def _predicates(where: Where) -> tuple[c.Predicate, ...]:
    return tuple(_predicate(number, *condition) for number, condition in enumerate(conditions_of(where)))


def _predicate(number: int, tag: str, op: str, value: Any) -> c.Predicate:
    """Convert one condition. number: its position in the list; errors about the value name it."""
    several = op == "in"
    given = enumerate(value) if several else [(number, value)]
    values = tuple([scalar(tag, row, item) for row, item in given])
    if any(isinstance(each, float) and math.isnan(each) for each in values):
        remedy = "pass a number, or leave the condition out"
        raise InvalidRequestError(f"where: {tag!r} {op} NaN: NaN equals no value; {remedy}")
    return c.Predicate(tag=tag, op=op, value=values if several else values[0])


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "where": _predicates,
    "order": lambda value: _one_of(c.Order, "order", value),
    "partial": lambda value: _one_of(c.Partial, "partial", value),
    "lease_s": lambda value: seconds_if_any("lease_s", value, positive=True),
    "partial_after_s": lambda value: seconds_if_any("partial_after_s", value),
}
"""Functions that convert or check an option; other options are passed to the command unchanged."""


def settle_claims(
    session_state: SessionState, /, make: Callable[..., c.Command], meta: KVBatchMeta, **more: Any
) -> Operation[list[str]]:
    """Acknowledge, release or extend the claimed samples of `meta`: `make` is `Ack`, `Nack` or `Extend`, and `more` has
    further fields of this command. Return the ids of samples that were cleared in the meantime. Raise
    `InvalidRequestError` for a meta that has samples but no claim."""
    if not require_meta(meta).size:
        return []
    if meta.task_name is None or meta.claims is None:
        raise InvalidRequestError(
            "meta has no claim ids, so it was not returned by a claim; pass the meta that claim_meta returned, or a "
            "subset of it"
        )
    samples = samples_of(meta, meta.partition_id)
    command = make(partition=meta.partition_id, task=meta.task_name, samples=samples, claims=meta.claims, **more)
    settled = yield from send_for_samples(meta.sample_ids, command)
    return [meta.sample_ids[position] for position in settled.result.cleared.tolist()]


def extend(session_state: SessionState, meta: KVBatchMeta, lease_s: float) -> Operation[list[str]]:
    """Set the leases of the claimed samples of `meta` to end `lease_s` from now."""
    end_s = seconds("lease_s", lease_s, positive=True)
    return (yield from settle_claims(session_state, c.Extend, meta, lease_s=end_s))


def consumed(session_state: SessionState, partition: str, task_names: Sequence[str]) -> Operation[bool]:
    """Return whether the partition is complete and the tasks have consumed all of its samples."""
    tasks = tuple(list_of_names("task_names", task_names))
    command = c.CheckConsumption(partition=name_of("partition_id", partition), tasks=tasks)
    answer = yield Send(command)
    return bool(answer.result.consumed)


def why_blocked(
    session_state: SessionState,
    /,
    partition: str,
    task: str,
    fields: Sequence[str],
    **conditions: Unpack[ClaimConditions],
) -> Operation[c.Blocked]:
    """Explain why a claim would wait now."""
    command = c.WhyBlocked(
        partition=name_of("partition_id", partition),
        task=name_of("task_name", task),
        fields=tuple(list_of_names("required_fields", fields)),
        **convert_options(ClaimConditions, conditions),
    )
    return (yield Send(command)).result  # type: ignore[no-any-return]
