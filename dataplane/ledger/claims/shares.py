"""Shares: the selection of one step of a task. The first rank that claims fixes it, and it is dealt to all ranks.

Shares that no rank has claimed yet are held: claimed, and on lease to `HELD` (or `HELD_ON_LEASE`) until the
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
"""How long shares are held for their ranks if the first claim has no lease: as long as torch.distributed waits
for a missing rank."""


def share(selection: Selection, partition: Partition, task: Task, command: Claim) -> Int64s:
    """Return the rows that the rank gets now: the live rows of its share that are held for it or unclaimed.

    Raises: `InvalidRequestError` if the rank got all of them before, `ShareConflictError` if another claim has some.
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
            f"rank {rank} of {command.dp_world} already got its share of step {step} of task {task.name!r} "
            f"({len(mine)} samples); each share is given out once, unless its claim is returned"
        )
    granted: Int64s = rows[free]
    return granted


def fix(partition: Partition, command: Claim, chosen: Chosen, claim_id: int) -> Selection:
    """Deal the selection of the command's step to its ranks."""
    assert command.dp_world is not None
    lengths = partition.tags.numbers(INPUT_LENGTHS, chosen.rows)
    ranks = samplers.shares(sampler_of(command), chosen.picked, command.dp_world, lengths)
    return Selection(terms_of(command), chosen.rows.copy(), partition.generations_of(chosen.rows), ranks, claim_id)


def find(task: Task, command: Claim) -> Selection | None:
    """Return the selection of the command's step, or None if it is not fixed. `InvalidRequestError` if it was
    fixed on other terms, or if the step is too old and its selection was discarded."""
    step = command.step
    assert step is not None
    found = task.selections.get(step)
    if found is None:
        if step <= task.forgotten:
            raise InvalidRequestError(
                f"step {step} of task {task.name!r} is too old: the service keeps the shares of the last "
                f"{len(task.selections)} steps only"
            )
        return None
    asked = terms_of(command)
    if asked != found.terms:
        differing = [name for name in asked if asked[name] != found.terms[name]]
        fixed, wanted = (", ".join(f"{name}={terms[name]}" for name in differing) for terms in (found.terms, asked))
        raise InvalidRequestError(
            f"step {step} of task {task.name!r} was fixed with {fixed}; this claim has {wanted}. "
            "All ranks of a step must claim on the same terms."
        )
    return found


def remember(task: Task, step: int, selection: Selection, most: int) -> None:
    """Store the selection. Discard that of the lowest step if there are more than `most`."""
    task.selections[step] = selection
    if len(task.selections) > most:
        task.forgotten = max(task.forgotten, min(task.selections))
        del task.selections[min(task.selections)]


_RANK_FIELDS = frozenset(
    {"partition", "task", "dp_rank", "step", "blocking", "timeout_s", "lease_s", "samples", "peek"}
)
"""Fields of a claim that may differ between the ranks of a step."""


def terms_of(command: Claim) -> Terms:
    """Return the terms that the claims of all ranks of a step have in common."""
    given = {name: str(getattr(command, name)) for name in command.__struct_fields__ if name not in _RANK_FIELDS}
    return {
        **given,
        "fields": str(sorted(set(command.fields))),
        "where": " and ".join(f"{p.tag!r} {p.op} {p.value!r}" for p in command.where) or "nothing",
        "version_tag": repr(None if command.max_lag is None else command.version_tag),
        "group_by": repr(command.group_by if command.group_size is not None else None),
        "partial": str(None if command.partial_after_s is None else command.partial),
        "sampler": sampler_of(command),
    }
