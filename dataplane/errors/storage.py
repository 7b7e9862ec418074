"""Errors of memory, disks and what they hold; `dataplane.errors` has all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane.errors.base import SHOWN, DataPlaneError


class ChecksumError(DataPlaneError, OSError):
    """A row's bytes do not have the checksum that its writer gave it. `total` rows of the field differ, `sample` is the
    first of them."""

    grpc_status = "DATA_LOSS"

    def __init__(
        self, *, partition: str, sample: str, field: str, unit: int, expected: int, got: int, total: int = 1
    ) -> None:
        more = f" (and {total - 1} more of this read)" if total > 1 else ""
        super().__init__(
            f"field {field!r} of sample {sample!r}{more} of partition {partition!r} is damaged: its bytes from storage "
            f"unit {unit} have the checksum {got:08x}, what was written had {expected:08x}. Nothing of the read was "
            "returned. Read it again; if that fails too, the unit holds damaged bytes: produce the field again, and "
            "look at that host's memory, disk and network. A writer that changes tensors during a put causes this too.",
            partition=partition,
            sample=sample,
            field=field,
            unit=unit,
            expected=expected,
            got=got,
            total=total,
        )


class DrainError(DataPlaneError, RuntimeError):
    """A storage unit could not be emptied: `cells` are left there, in bytes by partition (`live`), and what puts under
    way have reserved. Nothing is lost; `why` says what was in the way. `marked`: it takes nothing new all the same."""

    grpc_status = "FAILED_PRECONDITION"

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
        largest = sorted(live.items(), key=lambda item: -item[1])
        where = "".join(f"; partition {name!r} has {size:,} bytes there" for name, size in largest[:SHOWN])
        puts = f"; puts have reserved {reserved_bytes:,} bytes there" if reserved_bytes else ""
        who = f" ({', '.join(holders)})" if reserved_bytes and holders else ""
        left = f"storage unit {unit} is not empty: {cells:,} cells are left{where}{puts}{who}. {why.rstrip('.')}"
        super().__init__(
            f"{left}. Nothing is lost, the unit stays marked: drain it again to go on, or undrain it"
            if marked
            else f"storage unit {unit} is not drained: {why.rstrip('.')}. Nothing was changed. Start another storage "
            "unit first, or drain it all the same (force=True)",
            unit=unit,
            cells=cells,
            live=dict(largest[:SHOWN]),
            reserved_bytes=reserved_bytes,
            holders=list(holders),
            why=why,
            marked=marked,
        )


class ArenaSpaceError(DataPlaneError, OSError):
    """Too little memory behind the arena's directory. Sizes in bytes."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, *, directory: str, found_bytes: int, wanted_bytes: int, limit: str = "") -> None:
        bound = f" ({limit})" if limit else ""
        super().__init__(
            f"the arena wants {wanted_bytes:,} bytes in {directory}, which has {found_bytes:,} free{bound}. Give a "
            "smaller --capacity, another --arena-dir, or the container a larger shared memory (docker --shm-size).",
            directory=directory,
            found_bytes=found_bytes,
            wanted_bytes=wanted_bytes,
            limit=limit,
        )


class StateDirError(DataPlaneError, OSError):
    grpc_status = "UNAVAILABLE"

    def __init__(self, *, directory: str, why: str, hint: str = "") -> None:
        text = f"the state directory {directory}: {why}"
        super().__init__(f"{text}. {hint}" if hint else text, directory=directory, why=why, hint=hint)


class CheckpointWriteError(DataPlaneError, OSError):
    """The file system did not take a checkpoint; an older one at its path is whole."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, *, file: str, why: str) -> None:
        super().__init__(
            f"cannot write the checkpoint: {file}: {why}. What was at its path is whole.", file=file, why=why
        )
