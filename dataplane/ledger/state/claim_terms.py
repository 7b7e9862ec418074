"""The terms of a claim as numbers and predicates."""

from __future__ import annotations

from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Claim, Predicate, WhyBlocked
from dataplane.ledger.state.tasks import ReadyIndex


def check_terms(command: Claim | WhyBlocked) -> None:
    """Raise `InvalidRequestError` for terms that no sample or group can satisfy."""
    if command.group_size is not None and command.group_size < 1:
        raise InvalidRequestError(f"group_size={command.group_size}: must be at least 1")
    if command.max_lag is not None and command.max_lag < 0:
        raise InvalidRequestError(f"max_lag={command.max_lag}: must not be negative")


def least_of(command: Claim) -> int:
    """Return the number of ready samples that ends the wait of the claim: `min_batch_size`, else the batch size,
    rounded down to whole groups, equally many for each rank."""
    least = command.batch_size if command.min_batch_size is None else command.min_batch_size
    multiple = (command.group_size or 1) * (command.dp_world or 1)
    return least // multiple * multiple


def kind_of(ready_index: ReadyIndex, command: Claim) -> str:
    """Return a key that is equal for claims that wait for the same samples, possibly in different numbers."""
    staleness = None if command.max_lag is None else (command.max_lag, command.version_tag)
    groups = None
    if command.group_size is not None:
        groups = command.group_by, command.group_size, command.partial_after_s
    return repr((ready_index.task.name, ready_index.fields, command.where, staleness, groups))


def conditions(version: int | None, command: Claim | WhyBlocked) -> tuple[Predicate, ...]:
    """Return the predicates that a sample's tags must satisfy while the partition is at this version (None: as 0): the
    command's `where`, and the limit of its `max_lag`."""
    if command.max_lag is None:
        return command.where
    oldest = (version or 0) - command.max_lag
    return (*command.where, Predicate(tag=command.version_tag, op=">=", value=oldest))
