"""The operation that declares a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client.operations.put import name_tuple
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.data.columns import declared_specs
from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c


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
    """Declare a partition; what was remembered of its schema is forgotten."""
    command = c.Register(
        partition=partition,
        fields=declared_specs(fields),
        num_samples=num_samples,
        tasks=name_tuple("consumer_tasks", consumer_tasks),
        group_size=grpo_group_size,
        enums=None if enums is None else {name: tuple(values) for name, values in enums.items()},
        strict=strict,
        budget_bytes=budget_bytes,
        when_full=_when_full(when_full),
    )
    session_state.schemas.forget(partition)
    yield Send(command)


def _when_full(policy: str) -> c.WhenFull:
    try:
        return c.WhenFull(policy)
    except ValueError:
        raise InvalidRequestError(f"when_full={policy!r}: expected one of {', '.join(c.WhenFull)}") from None
