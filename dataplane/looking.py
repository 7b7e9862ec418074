"""A close look at a running service, as operations of the client: for dashboards and for whoever asks why."""

from __future__ import annotations

from dataplane.desk import Desk
from dataplane.errors import DataPlaneError, SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.samples import samples_of
from dataplane.steps import Operation, Send


def matrix(desk: Desk, partition: str, columns: int) -> Operation[c.Matrix]:
    """What of a partition is produced and consumed."""
    return (yield Send(c.Inspect(partition=partition, columns=columns))).result  # type: ignore[no-any-return]


def show_sample(desk: Desk, sample: str, partition: str | None) -> Operation[c.Shown]:
    """Everything about one sample, in the first partition that has it if none is named."""
    if partition is not None:
        return (yield Send(c.Show(partition=partition, samples=samples_of([sample])))).result  # type: ignore[no-any-return]
    report: c.StatsReport = (yield Send(c.Stats())).result
    names = [found.partition for found in report.partitions]
    for name in names:
        try:
            return (yield Send(c.Show(partition=name, samples=samples_of([sample])))).result  # type: ignore[no-any-return]
        except SampleNotFoundError:
            continue
        except DataPlaneError:
            if name in [found.partition for found in (yield Send(c.Stats())).result.partitions]:
                raise
    raise SampleNotFoundError(partition=" or ".join(names) or "(there is none)", samples=[sample], total=1)


def memory_map(desk: Desk, unit: int, cells: int) -> Operation[c.MemoryMap]:
    """What the bytes of a unit's arena are."""
    return (yield Send(c.MapMemory(unit=unit, cells=cells))).result  # type: ignore[no-any-return]


def waits(desk: Desk) -> Operation[c.WaitList]:
    """Who waits for what."""
    return (yield Send(c.Waits())).result  # type: ignore[no-any-return]
