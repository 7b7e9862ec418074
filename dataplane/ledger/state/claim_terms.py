"""What a claim asks for, as numbers and predicates."""

from __future__ import annotations

from dataplane.ledger.commands import Claim, Predicate


def least_of(command: Claim) -> int:
    """How many ready samples end the wait: whole groups, and as many for each rank."""
    least = command.batch_size if command.min_batch_size is None else command.min_batch_size
    unit = (command.group_size or 1) * (command.dp_world or 1)
    return least // unit * unit


def conditions(version: int | None, command: Claim) -> tuple[Predicate, ...]:
    """All that a sample's tags must fulfil while the partition is at this version."""
    if command.max_lag is None:
        return command.where
    oldest = (version or 0) - command.max_lag
    return (*command.where, Predicate(tag=command.version_tag, op=">=", value=oldest))
