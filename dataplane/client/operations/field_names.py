"""The schema of a partition as a client knows it, and names that do not fit it: what is probably misspelled is said in
the log, once."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence

from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import Schema, SessionState
from dataplane.errors import first_few
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)


def describe(session_state: SessionState, partition: str) -> Operation[Schema]:
    """Ask for the partition's schema, and remember it."""
    session_state.schemas.forget(partition)
    described = yield Send(c.Describe(partition=partition))
    found: c.Described = described.result
    schema = Schema(found.fields, undeclared=found.undeclared, strict=found.strict)
    session_state.schemas.remember(partition, schema)
    return schema


def schema_for_put(session_state: SessionState, partition: str, names: Iterable[str]) -> Operation[Schema]:
    """The schema as it is remembered, or else as it is. A name that is not among the declared ones, where there are
    any, gets a warning, once."""
    known = session_state.schemas.get(partition)
    schema = (yield from describe(session_state, partition)) if known is None else known
    odd = _undeclared(schema, names)
    if not odd or not (odd := session_state.warned.first("put", partition, odd)):
        return schema
    if known is not None:
        schema = yield from describe(session_state, partition)  # somebody may have declared it since
    for name in _undeclared(schema, odd):
        log.warning(
            "put: field %r is not declared in partition %r, and is stored all the same. %s",
            name,
            partition,
            _meant(name, schema.declared),
        )
    return schema


def _undeclared(schema: Schema, names: Iterable[str]) -> list[str]:
    """None where nothing is declared; the service refuses them where the schema is strict."""
    odd = [] if schema.strict else [name for name in names if not schema.declares(name)]
    return odd if odd and schema.declared else []


def check_claim(session_state: SessionState, command: c.Claim) -> Operation[None]:
    """Say at once, and once, which fields of a claim nobody has declared and no live sample has: the claim waits for
    them, since any producer may put them later (where the schema is strict, the service refuses it)."""
    known = session_state.schemas.get(command.partition)
    odd = [name for name in dict.fromkeys(command.fields) if known is None or name not in known]
    if not odd or not (odd := session_state.warned.first("claim", command.partition, odd)):
        return
    schema = yield from describe(session_state, command.partition)
    if schema.strict:
        return
    waits = "the claim waits until somebody puts it" if command.blocking else "nothing is ready until somebody puts it"
    for name in odd:
        if name not in schema:
            log.warning(
                "claim of task %r: field %r of partition %r is not declared, and no live sample has it; %s. %s",
                command.task,
                name,
                command.partition,
                waits,
                _meant(name, list(schema)),
            )


def _meant(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There are: {first_few(known)}" if known else "No field is there yet; register_partition declares fields"
