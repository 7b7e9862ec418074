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


def claimable_share(selection: Selection, partition: Partition, task: Task, command: Claim) -> Int64s:
    """Return the rows that the command's rank gets now: the live rows of its share that are held for it or unclaimed.

    Raises: `InvalidRequestError` if the rank got all of them before, `ShareConflictError` if another claim has some.
    """
    rank = command.dp_rank
    step = command.step
    assert rank is not None
    assert step is not None
    in_share = np.flatnonzero(selection.ranks == rank)
    rows = selection.rows[in_share]
    rows = rows[partition.rows.generations[rows] == selection.generations[in_share]]  # without cleared samples
    claim_ids = task.claim_ids[rows]
    available = (claim_ids == 0) | (claim_ids == selection.claim_id)
    # Claims of this rank that got the share before. Acknowledged rows have the negated id of their claim.
    earlier_claims = selection.given.get(rank, [])
    of_others = ~available & ~np.isin(np.abs(claim_ids), earlier_claims)
    if some(of_others):
        taken = rows[of_others]
        raise ShareConflictError(
            partition=partition.name,
            task=task.name,
            step=step,
            rank=rank,
            samples=partition.rows.names_of(taken[:5]),
            total=len(taken),
        )
    if earlier_claims and not some(available):
        raise InvalidRequestError(
            f"rank {rank} of {command.dp_world} already got its share of step {step} of task {task.name!r} "
            f"({len(in_share)} samples); each share is given out once, unless its claim is given back (nack)"
        )
    granted: Int64s = rows[available]
    return granted


def deal_selection(partition: Partition, command: Claim, chosen: Chosen, claim_id: int) -> Selection:
    """Return the chosen samples as the selection of the command's step, dealt to its ranks. claim_id: the claim that
    will hold the samples until the ranks claim them."""
    assert command.dp_world is not None
    lengths = partition.tags.numbers(INPUT_LENGTHS, chosen.rows)
    ranks = samplers.shares(sampler_of(command), chosen.picked, command.dp_world, lengths)
    return Selection(terms_of(command), chosen.rows.copy(), partition.generations_of(chosen.rows), ranks, claim_id)


def find_selection(task: Task, command: Claim) -> Selection | None:
    """Return the stored selection of the command's step, or None if no rank has claimed yet. Raises
    `InvalidRequestError` if the first claim had other terms, or if the step is too old and its selection was
    discarded."""
    step = command.step
    assert step is not None
    stored = task.selections.get(step)
    if stored is None:
        if step <= task.forgotten:
            raise InvalidRequestError(
                f"step {step} of task {task.name!r} is too old: the service only remembers the shares of its last "
                f"{len(task.selections)} steps; continue with a later step"
            )
        return None
    terms = terms_of(command)
    if terms != stored.terms:
        differing = [name for name in terms if terms[name] != stored.terms[name]]
        first_terms = ", ".join(f"{name}={stored.terms[name]}" for name in differing)
        these_terms = ", ".join(f"{name}={terms[name]}" for name in differing)
        raise InvalidRequestError(
            f"step {step} of task {task.name!r} was fixed with {first_terms}; this claim has {these_terms}. "
            "All ranks of a step must claim with the same arguments."
        )
    return stored


def store_selection(task: Task, step: int, selection: Selection, most: int) -> None:
    """Store the selection of a step above `task.forgotten`. If there are more than `most` now, discard that of the
    lowest step, which becomes `task.forgotten`."""
    task.selections[step] = selection
    if len(task.selections) > most:
        task.forgotten = min(task.selections)
        del task.selections[task.forgotten]


_RANK_FIELDS = frozenset(
    {"partition", "task", "dp_rank", "step", "blocking", "timeout_s", "lease_s", "samples", "peek"}
)
"""Fields of a claim that may differ between the ranks of a step."""


def terms_of(command: Claim) -> Terms:
    """Return the terms that the claims of all ranks of a step must have in common, as text. Terms without effect on the
    claim are written in the same way whatever their value."""
    common = {name: str(getattr(command, name)) for name in command.__struct_fields__ if name not in _RANK_FIELDS}
    return {
        **common,  # the terms below replace those of the same name
        "fields": str(sorted(set(command.fields))),
        "where": " and ".join(f"{p.tag!r} {p.op} {p.value!r}" for p in command.where) or "nothing",
        "version_tag": repr(None if command.max_lag is None else command.version_tag),
        "group_by": repr(command.group_by if command.group_size is not None else None),
        "partial": str(None if command.partial_after_s is None else command.partial),
        "sampler": sampler_of(command),
    }
