"""Errors of the connection to a service or a storage unit."""

from __future__ import annotations

from dataplane.errors.base import DataPlaneError


class ServiceError(DataPlaneError, ConnectionError):
    """The service could not be reached, or would not serve this client."""

    grpc_status = "UNAVAILABLE"


class ServiceUnavailableError(ServiceError):
    """`why` names the remedy, too, which depends on the cause."""

    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(f"no data plane service at {address}: {why.rstrip('.')}.", address=address, why=why)


class AuthenticationError(ServiceError):
    grpc_status = "UNAUTHENTICATED"

    def __init__(self, *, peer: str, why: str) -> None:
        super().__init__(
            f"{peer} refused this client: {why}. Pass the service's token (config.token or --token-file).",
            peer=peer,
            why=why,
        )


class TlsError(ServiceError):
    """One end speaks TLS and the other does not, or one does not take the other's certificate."""

    grpc_status = "UNAUTHENTICATED"

    def __init__(self, *, address: str, why: str) -> None:
        super().__init__(f"no secure connection to {address}: {why}", address=address, why=why)


class ProtocolVersionError(ServiceError):
    grpc_status = "UNIMPLEMENTED"

    def __init__(self, *, client_version: int, service_version: int) -> None:
        super().__init__(
            f"client speaks protocol version {client_version}, the service speaks {service_version}; "
            "install the same release on both",
            client_version=client_version,
            service_version=service_version,
        )


class SessionExpiredError(ServiceError):
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, session: int, why: str) -> None:
        super().__init__(
            f"session {session} is over: {why}. What it had claimed or reserved went back.", session=session, why=why
        )


class ServiceRestartedError(ServiceError):
    """`lost` says what went with the epoch that was expected; empty where it is not known to be lost."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, *, expected_epoch: int, got_epoch: int, what: str, lost: str = "") -> None:
        since = f"it began anew, without what it held: {lost}" if lost else "that process was restarted since"
        super().__init__(
            f"{what} belongs to epoch {got_epoch}, expected {expected_epoch}: {since}",
            expected_epoch=expected_epoch,
            got_epoch=got_epoch,
            what=what,
            lost=lost,
        )


class StorageUnitError(ServiceError):
    def __init__(self, *, unit: int, endpoint: str, why: str) -> None:
        super().__init__(f"storage unit {unit} at {endpoint}: {why}", unit=unit, endpoint=endpoint, why=why)


class CallCancelledError(ServiceError):
    grpc_status = "CANCELLED"

    def __init__(self, *, session: int, number: int) -> None:
        super().__init__(
            f"call {number} of session {session} was withdrawn before it took effect", session=session, number=number
        )
