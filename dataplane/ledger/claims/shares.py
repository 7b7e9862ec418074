"""Shares: the selection of one step of a task, fixed by the first rank that asks, dealt to all of them.

What nobody asked for yet is held for its rank: claimed, and on lease to `HELD` (or `HELD_ON_LEASE`) until the
selection's hold ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dataplane.core.schema import INPUT_LENGTHS
from dataplane.errors import InvalidRequestError, ShareConflictError
from dataplane.ledger.claims import samplers
from dataplane.ledger.claims.selection import Chosen, sampler_of
from dataplane.ledger.commands import Claim, Int64s
from dataplane.ledger.state.arrays import some
from dataplane.ledger.state.tasks import Selection, Task, Terms

if TYPE_CHECKING:
    from dataplane.ledger.state.partition import Partition

HOLD_S = 600.0
"""How long shares are held for their ranks when the first to ask names no lease: as long as torch.distributed lets
ranks wait for one that does not come."""


def share(selection: Selection, partition: Partition, task: Task, command: Claim) -> Int64s:
    """The rows that the rank gets now: those of its share that live and are held for it or free again.

    Raises: `InvalidRequestError` if it has had them all, `ShareConflictError` if another claim has some.
    """
    rank, step = command.dp_rank, command.step
    assert rank is not None
    assert step is not None
    mine = np.flatnonzero(selection.ranks == rank)
    rows = selection.rows[mine]
    rows = rows[partition.rows.generations[rows] == selection.generations[mine]]
    claim_ids = task.claim_ids[rows]
    free = (claim_ids == 0) | (claim_ids == selection.claim_id)
    had = selection.given.get(rank, [])
    taken = ~free & ~np.isin(np.abs(claim_ids), had)
    if some(taken):
        lost = rows[taken]
        raise ShareConflictError(
            partition=partition.name,
            task=task.name,
            step=step,
            rank=rank,
            samples=partition.rows.names_of(lost[:5]),
            total=len(lost),
        )
    if had and not some(free):
        raise InvalidRequestError(
            f"rank {rank} of {command.dp_world} has had its share of step {step} of task {task.name!r} "
            f"({len(mine)} samples); a share is handed out once, unless its claim was given back"
        )
    granted: Int64s = rows[free]
    return granted


def fix(partition: Partition, command: Claim, chosen: Chosen, claim_id: int) -> Selection:
    """The selection of the command's step, dealt to its ranks."""
    assert command.dp_world is not None
    lengths = partition.tags.numbers(INPUT_LENGTHS, chosen.rows)
    ranks = samplers.shares(sampler_of(command), chosen.picked, command.dp_world, lengths)
    return Selection(terms_of(command), chosen.rows.copy(), partition.generations_of(chosen.rows), ranks, claim_id)


def find(task: Task, command: Claim) -> Selection | None:
    """The selection of the command's step if it is fixed. `InvalidRequestError` if that was on other terms, or so many
    steps ago that it is forgotten."""
    step = command.step
    assert step is not None
    found = task.selections.get(step)
    if found is None:
        if step <= task.forgotten:
            raise InvalidRequestError(
                f"step {step} of task {task.name!r} is over: the service remembers the shares of the last "
                f"{len(task.selections)} steps only"
            )
        return None
    asked = terms_of(command)
    if asked != found.terms:
        differing = [name for name in asked if asked[name] != found.terms[name]]
        fixed, wanted = (", ".join(f"{name}={terms[name]}" for name in differing) for terms in (found.terms, asked))
        raise InvalidRequestError(
            f"step {step} of task {task.name!r} was fixed with {fixed}; this claim says {wanted}. "
            "All ranks of a step ask on the same terms."
        )
    return found


def remember(task: Task, step: int, selection: Selection, most: int) -> None:
    """Keep it; the lowest step goes where there are too many."""
    task.selections[step] = selection
    if len(task.selections) > most:
        task.forgotten = max(task.forgotten, min(task.selections))
        del task.selections[min(task.selections)]


_OWN = frozenset({"partition", "task", "dp_rank", "step", "blocking", "timeout_s", "lease_s", "samples", "peek"})
"""Fields of a claim in which the ranks of a step may differ."""


def terms_of(command: Claim) -> Terms:
    """What the claims of all ranks of a step have in common."""
    given = {name: str(getattr(command, name)) for name in command.__struct_fields__ if name not in _OWN}
    return {
        **given,
        "fields": str(sorted(set(command.fields))),
        "where": " and ".join(f"{p.tag!r} {p.op} {p.value!r}" for p in command.where) or "nothing",
        "version_tag": repr(None if command.max_lag is None else command.version_tag),
        "group_by": repr(command.group_by if command.group_size is not None else None),
        "partial": str(None if command.partial_after_s is None else command.partial),
        "sampler": sampler_of(command),
    }
