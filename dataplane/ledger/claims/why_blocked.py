"""Facts about why a claim gets no samples, and a sentence that states them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.errors import first_few
from dataplane.ledger.commands import Blocked, Claim, Int64s, Predicate, WhyBlocked, Writer
from dataplane.ledger.state.arrays import Bools
from dataplane.ledger.state.claim_terms import check_terms, conditions
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tasks import ReadyIndex

NAMED = 5
"""At most this many partial groups and writers are named."""


def blocked(state: State, partition: Partition, ready_index: ReadyIndex, command: Claim | WhyBlocked) -> Blocked:
    """Return the current facts about a claim."""
    check_terms(command)
    task, fields = ready_index.task, ready_index.fields
    rows = partition.rows.in_order()
    rows = rows[task.claim_ids[rows] == 0]
    has_all = partition.ready(task, fields, rows)
    ready = rows[has_all]
    where = conditions(partition.version, command)
    whole, partial, shown = _groups(partition, command, rows, has_all)
    puts, known = state.waiting_puts(partition), partition.names()
    facts = Blocked(
        unclaimed=len(rows),
        ready=len(ready),
        matching=int(np.count_nonzero(partition.tags.matches(where, ready))),
        claimed=task.claimed,
        leased=task.leased,
        held=task.held,
        lacking={name: _lacking(partition, name, rows) for name in fields},
        undeclared=tuple(name for name in fields if name not in known),
        unproduced=tuple(name for name in fields if name in known and not partition.columns_of(name)),
        filtered={_text(p): int(np.count_nonzero(~partition.tags.matches((p,), ready))) for p in where},
        groups=whole,
        partial_groups=partial,
        partial=shown,
        dropped=partition.dropped_partial,
        born=partition.born,
        expected=partition.num_samples,
        complete=partition.complete,
        version=partition.version,
        writers=_writers(state, partition, fields),
        waiting_puts=len(puts),
        waiting_puts_s=state.now - puts[0].since if puts else 0.0,
        waiting_writers=tuple(dict.fromkeys(put.session.name for put in puts))[:NAMED],
        why="",
    )
    return Blocked(**{**{name: getattr(facts, name) for name in facts.__struct_fields__}, "why": sentence(facts)})


def _lacking(partition: Partition, name: str, rows: Int64s) -> int:
    return len(rows) - int(np.count_nonzero(partition.has(name, rows)))


def _text(predicate: Predicate) -> str:
    value = predicate.value
    shown = f"({first_few([*value])})" if isinstance(value, tuple) else repr(value)
    return f"{predicate.tag} {predicate.op} {shown}"


def _groups(
    partition: Partition, command: Claim | WhyBlocked, rows: Int64s, has_all: Bools
) -> tuple[int | None, int | None, dict[str, int]]:
    """Return the numbers of whole and partial groups among the unclaimed samples, and the ready members of the
    first partial groups. A claim without groups has no such numbers."""
    if command.group_size is None:
        return None, None, {}
    tags = partition.tags
    tagged = tags.present(command.group_by, rows)
    rows, has_all = rows[tagged], has_all[tagged]
    groups = tags.codes(command.group_by, rows)
    firsts = np.unique(groups, return_index=True)[1]
    ready = np.bincount(groups[has_all], minlength=len(firsts))
    partial = np.flatnonzero(ready < command.group_size)
    first = partial[:NAMED]
    names = tags.values(command.group_by, rows[firsts[first]])
    shown = {str(name): int(count) for name, count in zip(names, ready[first], strict=True)}
    return len(firsts) - len(partial), len(partial), shown


def _writers(state: State, partition: Partition, fields: Sequence[str]) -> tuple[Writer, ...]:
    """Return the sessions that wrote last, and the last writer of each field; latest first."""
    last = dict(list(partition.writers.items())[-NAMED:])
    wrote: dict[int, list[str]] = {}
    for name in fields:
        writers = [field.writer for field in partition.columns_of(name) if field.writer is not None]
        if writers:
            number, who, when = max(writers, key=lambda writer: writer[2])
            wrote.setdefault(number, []).append(name)
            last.setdefault(number, (who, when))
    found = [
        Writer(
            session=number,
            name=who,
            ago_s=state.now - when,
            live=number in state.sessions and state.sessions[number].live,
            fields=tuple(wrote.get(number, ())),
        )
        for number, (who, when) in last.items()
    ]
    turn = {number: place for place, number in enumerate(partition.writers)}  # several may have written in one tick
    return tuple(sorted(found, key=lambda writer: (writer.ago_s, -turn.get(writer.session, -1), writer.session)))


def sentence(facts: Blocked) -> str:
    """State the facts in one sentence. Producers that wait for space come first, because the missing samples may
    be theirs."""
    parts = _back_pressure(facts)
    if facts.undeclared:
        parts.append(f"no client declared or produced {_names(facts.undeclared)}")
    if facts.unproduced:
        parts.append(f"no client has produced {_names(facts.unproduced)} for any live sample")
    late = [
        f"{count} lack {name!r}"
        for name, count in facts.lacking.items()
        if count and name not in facts.undeclared + facts.unproduced
    ]
    if facts.lacking:
        more = f" ({', '.join(late[:NAMED])})" if late else ""
        parts.append(f"of {facts.unclaimed} unclaimed live samples {facts.ready} have all fields{more}")
    else:
        parts.append(f"{facts.unclaimed} live samples are unclaimed")
    if facts.filtered:
        failing = ", ".join(f"{count} fail {text}" for text, count in facts.filtered.items())
        parts.append(f"of those, {failing}; {facts.matching} fulfil all conditions")
    if facts.groups is not None:
        shown = ", ".join(f"{name!r} has {count} ready" for name, count in facts.partial.items())
        parts.append(
            f"{facts.groups} groups are whole, {facts.partial_groups} partial" + (f" ({shown})" if shown else "")
        )
    if facts.dropped:
        parts.append(f"{facts.dropped} samples of partial groups were dropped")
    if facts.claimed:
        kept = [f"{count} of them {how}" for count, how in _kept(facts) if count]
        parts.append(", ".join([f"{facts.claimed} are claimed", *kept]))
    if not facts.complete:
        expected = "an unknown number" if facts.expected is None else str(facts.expected)
        parts.append(f"{facts.born} of {expected} samples have been put")
    parts.append(_last_writes(facts))
    return "; ".join(parts)


def _back_pressure(facts: Blocked) -> list[str]:
    if not facts.waiting_puts:
        return []
    one = facts.waiting_puts == 1
    return [
        f"{facts.waiting_puts} {'put waits' if one else 'puts wait'} for space ({'' if one else 'the longest '}for "
        f"{facts.waiting_puts_s:.1f} s, by {first_few(facts.waiting_writers)}): producers continue once "
        "samples are cleared or memory is added"
    ]


def _kept(facts: Blocked) -> list[tuple[int, str]]:
    return [(facts.leased, "on lease"), (facts.held, "held for their ranks")]


def _last_writes(facts: Blocked) -> str:
    if not facts.writers:
        return "no client has written yet"
    writes = []
    for writer in facts.writers[:NAMED]:
        what = f" ({_names(writer.fields)})" if writer.fields else ""
        gone = "" if writer.live else ", session ended"
        writes.append(f"{writer.name!r} {writer.ago_s:.1f} s ago{what}{gone}")
    return f"last writes: {', '.join(writes)}"


def _names(names: Sequence[str]) -> str:
    return f"{'fields' if len(names) > 1 else 'field'} {first_few(names)}"
