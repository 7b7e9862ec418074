"""Errors as gRPC statuses and back. Each class of errors names its status."""

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


def to_status(error: e.DataPlaneError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Code, text and trailing metadata."""
    name, facts = e.to_wire(error)
    code, text = grpc.StatusCode[error.grpc_status], str(error)[: MAX_DETAIL_BYTES // 4]
    if len(facts) > MAX_DETAIL_BYTES:
        return code, text, ()
    details = pb.Error(name=name, facts=facts).SerializeToString()
    return code, text, ((DETAILS_KEY, details),)


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
