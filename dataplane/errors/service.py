"""Errors of the connection to a service or a storage unit."""

from __future__ import annotations

from dataplane.errors.base import DataPlaneError


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


class TlsError(ServiceError):
    """Only one end of the connection uses TLS, or one end rejected the other's certificate."""

    grpc_status = "UNAUTHENTICATED"

    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(f"no secure connection to {address}: {why}", address=address, why=why)


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
            cause, remedy = f"the process restarted without its state; lost: {lost}", "Connect a new client"
        else:
            cause, remedy = "the process was restarted", "Repeat the call; if it fails again, connect a new client"
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

    def __init__(self, *, session: int, number: int) -> None:
        super().__init__(
            f"call {number} of session {session} was cancelled before it took effect; nothing was changed",
            session=session,
            number=number,
        )
