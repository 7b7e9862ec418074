"""Errors as gRPC statuses and back: one table."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from dataplane import errors as e
from dataplane.protocol.pb import control_pb2 as pb

DETAILS_KEY = "tq-error-bin"
"""Trailing metadata that holds a serialized `Error`."""
MAX_DETAIL_BYTES = 4096
"""gRPC refuses trailers beyond 8 KiB; a longer error travels as its status and the start of its text."""

Code = grpc.StatusCode

STATUSES: dict[type[e.DataPlaneError], grpc.StatusCode] = {
    e.PartitionNotFoundError: Code.NOT_FOUND,
    e.TaskNotFoundError: Code.NOT_FOUND,
    e.FieldNotFoundError: Code.NOT_FOUND,
    e.SampleNotFoundError: Code.NOT_FOUND,
    e.FieldNotProducedError: Code.NOT_FOUND,
    e.StaleSampleError: Code.NOT_FOUND,
    e.SampleExistsError: Code.ALREADY_EXISTS,
    e.PartitionExistsError: Code.ALREADY_EXISTS,
    e.CheckpointError: Code.FAILED_PRECONDITION,
    e.SchemaError: Code.INVALID_ARGUMENT,
    e.StaleSchemaError: Code.ABORTED,
    e.InvalidRequestError: Code.INVALID_ARGUMENT,
    e.UnsupportedValueError: Code.INVALID_ARGUMENT,
    e.RequestTooLargeError: Code.OUT_OF_RANGE,
    e.LimitError: Code.RESOURCE_EXHAUSTED,
    e.RowsChangedError: Code.ABORTED,
    e.ShareConflictError: Code.FAILED_PRECONDITION,
    e.PartitionSealedError: Code.FAILED_PRECONDITION,
    e.PartitionDroppedError: Code.ABORTED,
    e.StaleCallError: Code.FAILED_PRECONDITION,
    e.ClientClosedError: Code.FAILED_PRECONDITION,
    e.RolloutAbortedError: Code.FAILED_PRECONDITION,
    e.CapacityTimeoutError: Code.RESOURCE_EXHAUSTED,
    e.ChecksumError: Code.DATA_LOSS,
    e.PortTakenError: Code.FAILED_PRECONDITION,
    e.ArenaSpaceError: Code.RESOURCE_EXHAUSTED,
    e.CheckpointWriteError: Code.RESOURCE_EXHAUSTED,
    e.DrainError: Code.FAILED_PRECONDITION,
    e.StateDirError: Code.UNAVAILABLE,
    e.ClaimTimeoutError: Code.DEADLINE_EXCEEDED,
    e.CallTimeoutError: Code.DEADLINE_EXCEEDED,
    e.ServiceUnavailableError: Code.UNAVAILABLE,
    e.StorageUnitError: Code.UNAVAILABLE,
    e.AuthenticationError: Code.UNAUTHENTICATED,
    e.TlsError: Code.UNAUTHENTICATED,
    e.ProtocolVersionError: Code.UNIMPLEMENTED,
    e.SessionExpiredError: Code.FAILED_PRECONDITION,
    e.ServiceRestartedError: Code.FAILED_PRECONDITION,
    e.CallCancelledError: Code.CANCELLED,
    e.InternalError: Code.INTERNAL,
}


def to_status(error: e.DataPlaneError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Code, text and trailing metadata."""
    name, facts = e.to_wire(error)
    text = str(error)[: MAX_DETAIL_BYTES // 4]
    if len(facts) > MAX_DETAIL_BYTES:
        return STATUSES[type(error)], text, ()
    details = pb.Error(name=name, facts=facts).SerializeToString()
    return STATUSES[type(error)], text, ((DETAILS_KEY, details),)


def from_status(error: grpc.RpcError, *, address: str, what: str, waited_s: float) -> e.DataPlaneError:
    """The error that `to_status` wrote; for a status that gRPC itself made, the nearest of ours."""
    assert isinstance(error, grpc.Call)
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                details = pb.Error.FromString(value)
            except DecodeError:
                break
            return e.from_wire(details.name, details.facts)
    text = error.details() or ""
    match error.code():
        case Code.UNAVAILABLE:
            return e.ServiceUnavailableError(address=address, why=text)
        case Code.RESOURCE_EXHAUSTED:
            return e.ServiceUnavailableError(address=address, why=f"it is busy: {text}")
        case Code.DEADLINE_EXCEEDED:
            return e.CallTimeoutError(what=what, waited_s=waited_s, peer=address)
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            return e.AuthenticationError(peer=address, why=text)
        case Code.INVALID_ARGUMENT:
            return e.InvalidRequestError(text)
        case code:
            return e.InternalError(what=f"{what}: {code.name} {text}")
