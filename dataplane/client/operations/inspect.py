"""A close look at a running service, as operations of the client: for dashboards and for whoever asks why."""

from __future__ import annotations

from dataplane.client.operations.sample_names import samples_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.ledger import commands as c


def matrix(session_state: SessionState, partition: str, columns: int) -> Operation[c.Matrix]:
    """What of a partition is produced and consumed."""
    return (yield Send(c.Inspect(partition=partition, columns=columns))).result  # type: ignore[no-any-return]


def show_sample(session_state: SessionState, sample: str, partition: str | None) -> Operation[c.Shown]:
    """Everything about one sample, in the first partition that has it if none is named."""
    return (yield Send(c.Show(partition=partition or "", samples=samples_of([sample])))).result  # type: ignore[no-any-return]


def memory_map(session_state: SessionState, unit: int, cells: int) -> Operation[c.MemoryMap]:
    """What the bytes of a unit's arena are."""
    return (yield Send(c.MapMemory(unit=unit, cells=cells))).result  # type: ignore[no-any-return]


def waits(session_state: SessionState) -> Operation[c.WaitList]:
    """Who waits for what."""
    return (yield Send(c.Waits())).result  # type: ignore[no-any-return]
