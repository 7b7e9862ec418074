"""The end of a whole partition."""

from __future__ import annotations

from dataplane.errors import PartitionDroppedError
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.state import State


def drop(state: State, partition: Partition) -> int:
    """The partition goes with all it holds, and whoever waits on it is told; how many samples lived."""
    count = partition.rows.live
    del state.partitions[partition.name]
    state.budgeted.pop(partition.account.number, None)
    partition.drop()
    for claim in state.waiting_claims(partition):
        waiting = f"a claim of task {claim.command.task!r}"
        state.unpark(claim, PartitionDroppedError(partition=partition.name, waiting=waiting))
    for put in state.waiting_puts(partition):
        state.unpark(put, PartitionDroppedError(partition=partition.name, waiting="a put"))
    return count


def drop_staged(state: State, session: int) -> None:
    """The partitions that this session staged and did not publish go."""
    for partition in [found for found in state.partitions.values() if found.owner == session]:
        drop(state, partition)
