"""The client's copy of a partition's schema, and one-time log warnings about field names that are probably
misspelled."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence

from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import Schema, SessionState
from dataplane.errors import first_few
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)


def fetch_schema(session_state: SessionState, partition: str) -> Operation[Schema]:
    """Fetch the partition's schema and cache it."""
    session_state.schemas.forget(partition)  # first: if the fetch fails, none is cached
    described = yield Send(c.Describe(partition=partition))
    result: c.Described = described.result
    schema = Schema(
        result.fields, undeclared=result.undeclared, open=result.open, widened=result.widened, strict=result.strict
    )
    session_state.schemas.remember(partition, schema)
    return schema


def schema_for_put(session_state: SessionState, partition: str, names: Iterable[str]) -> Operation[Schema]:
    """Return the cached schema, or fetch it. If the partition has declared fields, log one warning for each of `names`
    that is not declared, unless this client has logged it before."""
    cached = session_state.schemas.get(partition)
    schema = (yield from fetch_schema(session_state, partition)) if cached is None else cached
    undeclared = _undeclared(schema, names)
    if undeclared:
        undeclared = session_state.warned.filter_new("put", partition, undeclared)
    if not undeclared:
        return schema
    if cached is not None:
        schema = yield from fetch_schema(session_state, partition)  # another client may have declared them since
    for name in _undeclared(schema, undeclared):
        log.warning(
            "put: field %r is not declared in partition %r; it is stored anyway. %s",
            name,
            partition,
            _suggestion(name, schema.declared),
        )
    return schema


def _undeclared(schema: Schema, names: Iterable[str]) -> list[str]:
    """Return the names that are not declared. Return none if no field is declared, or if the schema is strict: the
    service then rejects them."""
    undeclared = [] if schema.strict else [name for name in names if not schema.declares(name)]
    return undeclared if undeclared and schema.declared else []


def check_claim(session_state: SessionState, command: c.Claim) -> Operation[None]:
    """Warn once about fields of a claim that are not declared and that no live sample has. The claim waits for
    them, since a producer may put them later (with a strict schema, the service rejects it)."""
    cached = session_state.schemas.get(command.partition)
    unknown = [name for name in dict.fromkeys(command.fields) if cached is None or name not in cached]
    if unknown:
        unknown = session_state.warned.filter_new("claim", command.partition, unknown)
    if not unknown:
        return
    schema = yield from fetch_schema(session_state, command.partition)  # the cached one may be outdated
    if schema.strict:  # the service rejects the claim
        return
    effect = "the claim waits until it is produced" if command.blocking else "no sample is ready until it is produced"
    for name in unknown:
        if name not in schema:
            log.warning(
                "claim of task %r: field %r of partition %r is not declared, and no live sample has it; %s. %s",
                command.task,
                name,
                command.partition,
                effect,
                _suggestion(name, list(schema)),
            )


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Return the sentence that ends a warning about the field `name`: the nearest known name, or the known names."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known fields: {first_few(known)}" if known else "No fields are known; declare them with register_partition"
