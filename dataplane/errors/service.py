"""Errors of the connection to a service or a storage unit, of its ports, memory, disks and stored
data, and its defects."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from dataplane.errors.base import SHOWN, DataPlaneError


class ServiceError(DataPlaneError, ConnectionError):
    """The service could not be reached, or rejected this client."""

    grpc_status = "UNAVAILABLE"


class ServiceUnavailableError(ServiceError):
    """The service does not respond. `why` names the cause and the remedy."""

    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(f"no data plane service at {address}: {why.rstrip('.')}.", address=address, why=why)


class AuthenticationError(ServiceError):
    """`peer`, the service or a storage unit, rejected the credentials of this client. `hint` replaces the usual
    remedy."""

    grpc_status = "UNAUTHENTICATED"

    def __init__(self, *, peer: str, why: str, hint: str = "") -> None:
        remedy = hint or "Pass the service's token (config.token, --token-file or TQ_TOKEN)."
        super().__init__(f"{peer} rejected this client: {why}. {remedy}", peer=peer, why=why, hint=hint)


class ProtocolVersionError(ServiceError):
    """Client and service have different protocol versions."""

    grpc_status = "UNIMPLEMENTED"

    def __init__(self, *, client_version: int, service_version: int) -> None:
        super().__init__(
            f"client has protocol version {client_version}, the service has {service_version}; "
            "install the same release on both",
            client_version=client_version,
            service_version=service_version,
        )


class SessionExpiredError(ServiceError):
    """The service has ended the client's session."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, session: int, why: str) -> None:
        super().__init__(
            f"session {session} has ended: {why}. Its leases and reservations were released. Connect a new client.",
            session=session,
            why=why,
        )


class SessionInterruptedError(ServiceError):
    """An interrupt, such as Ctrl-C, of a call in any thread of the client ended its session."""

    def __init__(self) -> None:
        super().__init__(
            "an interrupt (such as Ctrl-C) of a call of this client ended its session. Its claims and reservations are "
            "released, and it is not known whether this call was executed. The next call opens another session."
        )


class ServiceRestartedError(ServiceError):
    """`what`, a process or what belongs to it, is of another epoch than expected. `lost` describes the state that was
    lost with the expected epoch; "" if no loss is known. `got_epoch`: 0 if it is only known to be an earlier one."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, expected_epoch: int, got_epoch: int, what: str, lost: str = "") -> None:
        if got_epoch:
            found = f"{what} has epoch {got_epoch}, expected epoch {expected_epoch} (an epoch is one run of a process)"
        else:
            found = f"{what} is lost"
        if lost:
            cause = f"the process restarted without its state; lost: {lost}"
            remedy = "Connect a new client"
        else:
            cause = "the process was restarted"
            remedy = "Repeat the call; if it fails again, connect a new client"
        super().__init__(
            f"{found}: {cause}. {remedy} and put lost samples again.",
            expected_epoch=expected_epoch,
            got_epoch=got_epoch,
            what=what,
            lost=lost,
        )


class StorageUnitError(ServiceError):
    """A storage unit cannot be reached, has failed, or does not exist. `endpoint` is "" or "?" if it is unknown."""

    def __init__(self, *, unit: int, endpoint: str, why: str) -> None:
        at = "" if endpoint in ("", "?") else f" at {endpoint}"
        super().__init__(f"storage unit {unit}{at}: {why}", unit=unit, endpoint=endpoint, why=why)


class CallCancelledError(ServiceError):
    """The call was cancelled before it took effect."""

    grpc_status = "CANCELLED"

    def __init__(self, *, session: int, call_id: int) -> None:
        super().__init__(
            f"call {call_id} of session {session} was cancelled before it took effect; nothing was changed",
            session=session,
            call_id=call_id,
        )


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


class PortTakenError(DataPlaneError, OSError):
    """The port of `address` is in use. `holder`: the process that listens there or has another socket on the port; ""
    if unknown. `hint` replaces the usual remedy."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, address: str, holder: str = "", hint: str = "") -> None:
        by = f" by {holder}" if holder else ""
        remedy = hint or "Stop the process that uses it, or choose another port."
        super().__init__(
            f"cannot listen on {address}: the port is in use{by}. {remedy}", address=address, holder=holder, hint=hint
        )
        self.errno = errno.EADDRINUSE


class InternalError(DataPlaneError, RuntimeError):
    """A defect of this package. `what` describes it."""

    grpc_status = "INTERNAL"

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"internal error: {what}. This is a defect; please report it with the logs of this process and the "
            "service.",
            what=what,
        )
