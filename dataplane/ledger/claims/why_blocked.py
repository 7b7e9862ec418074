"""Facts about why a claim gets no samples, and a sentence that states them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from dataplane.errors import first_few
from dataplane.ledger.commands import Blocked, Claim, Int64s, Predicate, WhyBlocked, Writer
from dataplane.ledger.state.arrays import Bools
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tasks import ReadyIndex, check_terms, conditions

NAMED = 5
"""At most this many partial groups and writers are named."""


def blocked(state: State, partition: Partition, ready_index: ReadyIndex, command: Claim | WhyBlocked) -> Blocked:
    """Return the current facts about why the claim gets no samples, with a sentence in `why`. Of `ready_index` only the
    task and the fields are used."""
    check_terms(command)
    task = ready_index.task
    fields = ready_index.fields
    rows = partition.rows.in_order()
    rows = rows[task.claim_ids[rows] == 0]
    has_all = partition.ready(task, fields, rows)
    ready = rows[has_all]
    where = conditions(partition.version, command)
    whole_groups, partial_groups, partial = _group_counts(partition, command, rows, has_all)
    puts = state.waiting_puts(partition)
    known = partition.names()
    facts = Blocked(
        unclaimed=len(rows),
        ready=len(ready),
        matching=int(np.count_nonzero(partition.tags.matches(where, ready))),
        claimed=task.claimed,
        leased=task.leased,
        held=task.held,
        lacking={name: _count_lacking(partition, name, rows) for name in fields},
        undeclared=tuple(name for name in fields if name not in known),
        unproduced=tuple(name for name in fields if name in known and not partition.columns_of(name)),
        filtered={_predicate_text(p): int(np.count_nonzero(~partition.tags.matches((p,), ready))) for p in where},
        groups=whole_groups,
        partial_groups=partial_groups,
        partial=partial,
        dropped=partition.dropped_partial,
        born=partition.born,
        expected=partition.num_samples,
        complete=partition.complete,
        version=partition.version,
        writers=_last_writers(state, partition, fields),
        waiting_puts=len(puts),
        waiting_puts_s=state.now - puts[0].since if puts else 0.0,
        waiting_writers=tuple(dict.fromkeys(put.session.name for put in puts))[:NAMED],
        why="",
    )
    return msgspec.structs.replace(facts, why=sentence(facts))


def _count_lacking(partition: Partition, name: str, rows: Int64s) -> int:
    return len(rows) - int(np.count_nonzero(partition.has(name, rows)))


def _predicate_text(predicate: Predicate) -> str:
    value = predicate.value
    shown = f"({first_few([*value])})" if isinstance(value, tuple) else repr(value)
    return f"{predicate.tag} {predicate.op} {shown}"


def _group_counts(
    partition: Partition, command: Claim | WhyBlocked, rows: Int64s, has_all: Bools
) -> tuple[int | None, int | None, dict[str, int]]:
    """Return the numbers of whole and partial groups among the unclaimed samples `rows`, and the number of ready
    members of the first partial groups, by group. Without groups in the claim: (None, None, {}).
    has_all: which of the rows have all fields of the claim."""
    if command.group_size is None:
        return None, None, {}
    tags = partition.tags
    tagged = tags.present(command.group_by, rows)
    rows = rows[tagged]
    has_all = has_all[tagged]
    groups = tags.codes(command.group_by, rows)
    firsts = np.unique(groups, return_index=True)[1]  # position of each group's first member
    ready_counts = np.bincount(groups[has_all], minlength=len(firsts))
    partial = np.flatnonzero(ready_counts < command.group_size)
    named = partial[:NAMED]
    names = tags.values(command.group_by, rows[firsts[named]])
    ready_by_group = {str(name): int(count) for name, count in zip(names, ready_counts[named], strict=True)}
    return len(firsts) - len(partial), len(partial), ready_by_group


def _last_writers(state: State, partition: Partition, fields: Sequence[str]) -> tuple[Writer, ...]:
    """Return the sessions that wrote last to the partition, and the last writer of each field; latest first."""
    last_writes = dict(list(partition.writers.items())[-NAMED:])  # session id -> (client name, time)
    fields_by_session: dict[int, list[str]] = {}
    for name in fields:
        writers = [field.writer for field in partition.columns_of(name) if field.writer is not None]
        if writers:
            session_id, client, when = max(writers, key=lambda writer: writer[2])  # by time
            fields_by_session.setdefault(session_id, []).append(name)
            last_writes.setdefault(session_id, (client, when))  # `partition.writers` is at least as late
    result = [
        Writer(
            session=session_id,
            name=client,
            ago_s=state.now - when,
            live=session_id in state.sessions and state.sessions[session_id].live,
            fields=tuple(fields_by_session.get(session_id, ())),
        )
        for session_id, (client, when) in last_writes.items()
    ]
    # Several may have written at the same ledger time: then the order of `partition.writers` decides.
    write_order = {session_id: position for position, session_id in enumerate(partition.writers)}
    return tuple(
        sorted(result, key=lambda writer: (writer.ago_s, -write_order.get(writer.session, -1), writer.session))
    )


def sentence(facts: Blocked) -> str:
    """State the facts in one sentence. Producers that wait for space come first, because the missing samples may
    be theirs."""
    clauses = _back_pressure(facts)
    if facts.undeclared:
        clauses.append(f"no client declared or produced {_fields_text(facts.undeclared)}")
    if facts.unproduced:
        clauses.append(f"no client has produced {_fields_text(facts.unproduced)} for any live sample")
    lacking = [
        f"{count} lack {name!r}"
        for name, count in facts.lacking.items()
        if count and name not in facts.undeclared + facts.unproduced
    ]
    if facts.lacking:
        details = f" ({', '.join(lacking[:NAMED])})" if lacking else ""
        clauses.append(f"of {facts.unclaimed} unclaimed live samples {facts.ready} have all fields{details}")
    else:
        clauses.append(f"{facts.unclaimed} live samples are unclaimed")
    if facts.filtered:
        failing = ", ".join(f"{count} fail {text}" for text, count in facts.filtered.items())
        clauses.append(f"of those, {failing}; {facts.matching} fulfil all conditions")
    if facts.groups is not None:
        shown = ", ".join(f"{name!r} has {count} ready" for name, count in facts.partial.items())
        clauses.append(
            f"{facts.groups} groups are whole, {facts.partial_groups} partial" + (f" ({shown})" if shown else "")
        )
    if facts.dropped:
        clauses.append(f"{facts.dropped} samples of partial groups were dropped")
    if facts.claimed:
        held = [(facts.leased, "on lease"), (facts.held, "held for their ranks")]
        held_texts = [f"{count} of them {state}" for count, state in held if count]
        clauses.append(", ".join([f"{facts.claimed} are claimed", *held_texts]))
    if not facts.complete:
        expected = "an unknown number" if facts.expected is None else str(facts.expected)
        clauses.append(f"{facts.born} of {expected} samples have been put")
    clauses.append(_last_writes(facts))
    return "; ".join(clauses)


def _back_pressure(facts: Blocked) -> list[str]:
    """Return the part of the sentence about puts that wait for space, or [] without such puts."""
    if not facts.waiting_puts:
        return []
    puts_wait, longest = ("put waits", "") if facts.waiting_puts == 1 else ("puts wait", "the longest ")
    return [
        f"{facts.waiting_puts} {puts_wait} for space ({longest}for {facts.waiting_puts_s:.1f} s, "
        f"by {first_few(facts.waiting_writers)}): producers continue once samples are cleared or memory is added"
    ]


def _last_writes(facts: Blocked) -> str:
    """Say when the last writers wrote which of the claim's fields."""
    if not facts.writers:
        return "no client has written yet"
    writes = []
    for writer in facts.writers[:NAMED]:
        what = f" ({_fields_text(writer.fields)})" if writer.fields else ""
        gone = "" if writer.live else ", session ended"
        writes.append(f"{writer.name!r} {writer.ago_s:.1f} s ago{what}{gone}")
    return f"last writes: {', '.join(writes)}"


def _fields_text(names: Sequence[str]) -> str:
    return f"{'fields' if len(names) > 1 else 'field'} {first_few(names)}"
