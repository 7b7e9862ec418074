"""A close look at a running service, as operations of the client: for dashboards and for whoever asks why."""

from __future__ import annotations

from dataplane.desk import Desk
from dataplane.ledger import commands as c
from dataplane.samples import samples_of
from dataplane.steps import Operation, Send


def matrix(desk: Desk, partition: str, columns: int) -> Operation[c.Matrix]:
    """What of a partition is produced and consumed."""
    return (yield Send(c.Inspect(partition=partition, columns=columns))).result  # type: ignore[no-any-return]


def show_sample(desk: Desk, sample: str, partition: str | None) -> Operation[c.Shown]:
    """Everything about one sample, in the first partition that has it if none is named."""
    return (yield Send(c.Show(partition=partition or "", samples=samples_of([sample])))).result  # type: ignore[no-any-return]


def memory_map(desk: Desk, unit: int, cells: int) -> Operation[c.MemoryMap]:
    """What the bytes of a unit's arena are."""
    return (yield Send(c.MapMemory(unit=unit, cells=cells))).result  # type: ignore[no-any-return]


def waits(desk: Desk) -> Operation[c.WaitList]:
    """Who waits for what."""
    return (yield Send(c.Waits())).result  # type: ignore[no-any-return]
