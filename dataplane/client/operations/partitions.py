"""Operations on partitions and on the service as a whole: declare, list, tag and clear; statistics and dashboard
data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dataplane.client.operations.sample_names import (
    Names,
    ids_of,
    meta_of,
    samples_of,
    send_for_samples,
    tag_columns,
)
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.data.columns import declared_specs
from dataplane.data.meta import KVBatchMeta, list_of_names, name_of
from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c

R = TypeVar("R", bound=c.Result)


def register(
    session_state: SessionState,
    partition: str,
    fields: Sequence[str] | Mapping[str, Any],
    num_samples: int | None,
    consumer_tasks: Sequence[str],
    grpo_group_size: int | None,
    enums: Mapping[str, Sequence[str]] | None,
    *,
    strict: bool,
    budget_bytes: int | None,
    when_full: str,
) -> Operation[None]:
    """Declare a partition and forget its cached schema."""
    command = c.Register(
        partition=name_of("partition_id", partition),
        fields=declared_specs(fields),
        num_samples=num_samples,
        tasks=tuple(list_of_names("consumer_tasks", consumer_tasks)),
        group_size=grpo_group_size,
        enums=None if enums is None else _enums(enums),
        strict=strict,
        budget_bytes=budget_bytes,
        when_full=_when_full(when_full),
    )
    session_state.schemas.forget(partition)  # first: the command may be executed although it fails here
    yield Send(command)


def _enums(enums: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the permitted values of tags. Raise `InvalidRequestError` or `UnsupportedValueError` unless it is a
    mapping of tag names to lists of strings."""
    if not isinstance(enums, Mapping):
        raise InvalidRequestError(f"enums={enums!r}: pass a mapping of tag names to lists of their permitted values")
    names = list_of_names("enums", list(enums))
    return {name: tuple(list_of_names(f"enums[{name!r}]", enums[name])) for name in names}


def _when_full(policy: str) -> c.WhenFull:
    """Return the policy of this name. Raise `InvalidRequestError` if there is none."""
    try:
        return c.WhenFull(policy)
    except ValueError:
        raise InvalidRequestError(f"when_full={policy!r}: expected one of {', '.join(c.WhenFull)}") from None


def list_samples(session_state: SessionState, partition: str) -> Operation[KVBatchMeta]:
    """Return every live sample of the partition, oldest first."""
    listed = yield Send(c.List(partition=name_of("partition_id", partition)))
    return meta_of(listed.result, partition)


def clear(session_state: SessionState, names: Names | None, partition: str) -> Operation[None]:
    """Delete samples, or the partition with its schema."""
    if names is None:
        session_state.schemas.forget(name_of("partition_id", partition))
    samples = None if names is None else samples_of(names, partition)
    yield Send(c.Clear(partition=partition, samples=samples))


def set_tags(
    session_state: SessionState, names: Names, partition: str, tags: Sequence[Mapping[str, Any]]
) -> Operation[None]:
    """Merge tags, one mapping per sample, into those of live samples, atomically."""
    ids = ids_of(names)
    samples = samples_of(names, partition, ids)
    command = c.SetTags(partition=partition, samples=samples, tags=tag_columns(tags, len(ids)))
    yield from send_for_samples(ids, command)


def stats(session_state: SessionState) -> Operation[c.StatsReport]:
    """Return the state of the service."""
    return (yield from ask(session_state, c.Stats()))


def ask(session_state: SessionState, command: c.Answered[R]) -> Operation[R]:
    """Send one command and return its result."""
    return (yield Send(command)).result  # type: ignore[no-any-return]


def matrix(session_state: SessionState, partition: str, columns: int) -> Operation[c.Matrix]:
    """Return production and consumption of a partition."""
    command = c.Inspect(partition=name_of("partition_id", partition), columns=columns)
    return (yield from ask(session_state, command))


def show_sample(session_state: SessionState, sample: str, partition: str | None) -> Operation[c.Shown]:
    """Return all facts about one sample, from the first partition that contains it if none is named."""
    named = "" if partition is None else name_of("partition_id", partition)
    samples = c.Samples(ids=(name_of("sample_id", sample),))
    return (yield from ask(session_state, c.Show(partition=named, samples=samples)))


def memory_map(session_state: SessionState, unit: int, cells: int) -> Operation[c.MemoryMap]:
    """Return the usage of a unit's arena by address."""
    return (yield from ask(session_state, c.MapMemory(unit=unit, cells=cells)))


def waits(session_state: SessionState) -> Operation[c.WaitList]:
    """Return the waiting claims and puts."""
    return (yield from ask(session_state, c.Waits()))
