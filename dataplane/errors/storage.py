"""Errors of memory, disks and stored data. `dataplane.errors` exports them with all other errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane.errors.base import SHOWN, DataPlaneError


class ChecksumError(DataPlaneError, OSError):
    """The bytes of a row do not match the checksum of its writer. `total` rows of the field are damaged; `sample`
    is the first of them. `unit` stores it; `expected` is the writer's checksum, `got` that of the bytes read."""

    grpc_status = "DATA_LOSS"

    def __init__(
        self, *, partition: str, sample: str, field: str, unit: int, expected: int, got: int, total: int = 1
    ) -> None:
        more = f" (and {total - 1} more in this read)" if total > 1 else ""
        super().__init__(
            f"field {field!r} of sample {sample!r}{more} of partition {partition!r} is damaged: the bytes read from "
            f"storage unit {unit} have checksum {got:08x}, the written bytes had {expected:08x}. The read returned no "
            "data. Retry the read. If it fails again, the unit holds damaged bytes: produce the field again and check "
            "memory, disk and network of that host. A writer that modifies tensors during a put also causes this.",
            partition=partition,
            sample=sample,
            field=field,
            unit=unit,
            expected=expected,
            got=got,
            total=total,
        )


class DrainError(DataPlaneError, RuntimeError):
    """A storage unit could not be emptied. `cells` counts the remaining cells, `live` has the bytes of the largest few
    partitions there, `reserved_bytes` is the space reserved by active puts, `holders` names the sessions that hold
    reservations or pins. No data is lost. `why` is the cause. `marked`: the unit remains marked for draining and
    accepts no new rows. Otherwise the drain was rejected before any change.

    `FORCE` and `UNDRAIN` are the parts of the text that name arguments and methods of the client. A program that offers
    them under other names replaces these parts."""

    grpc_status = "FAILED_PRECONDITION"
    FORCE = "force=True"
    UNDRAIN = "undrain it"

    def __init__(
        self,
        *,
        unit: int,
        cells: int,
        live: Mapping[str, int],
        reserved_bytes: int,
        holders: Sequence[str],
        why: str,
        marked: bool = True,
    ) -> None:
        largest = sorted(live.items(), key=lambda item: -item[1])[:SHOWN]
        rows = "".join(f"; partition {name!r} has {size:,} bytes there" for name, size in largest)
        puts = f"; puts have reserved {reserved_bytes:,} bytes there" if reserved_bytes else ""
        sessions = f" ({', '.join(holders)})" if reserved_bytes and holders else ""
        cause = why.rstrip(".")
        if marked:
            message = (
                f"storage unit {unit} is not empty: {cells:,} values of samples are left{rows}{puts}{sessions}. "
                f"{cause}. No data is lost and the unit remains marked for draining: drain it again to continue, or "
                f"{self.UNDRAIN}"
            )
        else:
            message = (
                f"storage unit {unit} is not drained: {cause}. Nothing was changed. Start another storage unit first, "
                f"or force the drain ({self.FORCE})"
            )
        super().__init__(
            message,
            unit=unit,
            cells=cells,
            live=dict(largest),
            reserved_bytes=reserved_bytes,
            holders=list(holders),
            why=why,
            marked=marked,
        )


class ArenaSpaceError(DataPlaneError, OSError):
    """The file system, a cgroup or the machine has too little free memory for new arenas, or for the growth of one.
    Sizes are in bytes. `limit` describes which limit has only `found_bytes` left; "" if unknown. `wanted_bytes` is the
    sum over the arenas of `units` storage units. Of `found_bytes`, other running storage units may still take
    `growing_bytes`, most of it for the arenas `growing` (paths)."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        *,
        directory: str,
        found_bytes: int,
        wanted_bytes: int,
        limit: str = "",
        units: int = 1,
        growing_bytes: int = 0,
        growing: Sequence[str] = (),
    ) -> None:
        who = "the arena needs" if units == 1 else f"the arenas of {units:,} storage units need"
        bound = f" ({limit})" if limit else ""
        fewer = "" if units == 1 else ", fewer --units"
        others = stop = ""
        if growing_bytes:
            names = ", ".join(growing[:SHOWN])
            others = f", of which running storage units may still take {growing_bytes:,} (largest: {names})"
            stop = " stop services that run there,"
        super().__init__(
            f"{who} {wanted_bytes:,} bytes in {directory}, which has {found_bytes:,} free{bound}{others}. Set a "
            f"smaller --capacity{fewer} or another --arena-dir,{stop} or increase the container's shared memory "
            "(docker --shm-size).",
            directory=directory,
            found_bytes=found_bytes,
            wanted_bytes=wanted_bytes,
            limit=limit,
            units=units,
            growing_bytes=growing_bytes,
            growing=list(growing[:SHOWN]),
        )


class StateDirError(DataPlaneError, OSError):
    """The state directory of the service cannot be used. `why` is the cause, `hint` the remedy, if there is one."""

    grpc_status = "UNAVAILABLE"

    def __init__(self, *, directory: str, why: str, hint: str = "") -> None:
        text = f"the state directory {directory}: {why}"
        super().__init__(f"{text}. {hint}" if hint else text, directory=directory, why=why, hint=hint)


class CheckpointWriteError(DataPlaneError, OSError):
    """The file system rejected the write of a checkpoint. An older checkpoint at the same path is intact."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, *, file: str, why: str) -> None:
        super().__init__(
            f"cannot write the checkpoint file {file}: {why}. Nothing was saved; an older checkpoint at the same path "
            "is intact.",
            file=file,
            why=why,
        )
