"""Conversion of errors to gRPC statuses and back. Each error class names its status."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from dataplane import errors as e
from dataplane.protocol.pb import control_pb2 as pb

DETAILS_KEY = "tq-error-bin"
"""Key of the trailing metadata with a serialized `Error`."""
MAX_DETAIL_BYTES = 4096
"""Maximum size of an error's facts, because gRPC rejects trailers beyond 8 KiB. A longer error is sent as its
status and the start of its text."""

Code = grpc.StatusCode


def to_status(error: e.DataPlaneError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return the status code, the start of the text, and the trailing metadata: the error itself, unless it is too
    long."""
    name, facts = e.to_wire(error)
    code = grpc.StatusCode[error.grpc_status]
    text = str(error)[: MAX_DETAIL_BYTES // 4]
    if len(facts) > MAX_DETAIL_BYTES:  # without the details
        return code, text, ()
    details = pb.Error(name=name, facts=facts).SerializeToString()
    return code, text, ((DETAILS_KEY, details),)


def from_status(error: grpc.RpcError, *, address: str, what: str, waited_s: float) -> e.DataPlaneError:
    """Return the error that `to_status` encoded. For a status without it, such as one created by gRPC itself, return
    the closest error. what: the call, which took `waited_s` so far."""
    assert isinstance(error, grpc.Call)
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                details = pb.Error.FromString(value)
            except DecodeError:  # use the status itself
                break
            return e.from_wire(details.name, details.facts)
    text = error.details() or ""
    match error.code():
        case Code.UNAVAILABLE:
            return e.ServiceUnavailableError(address=address, why=text)
        case Code.RESOURCE_EXHAUSTED:
            return e.ServiceUnavailableError(address=address, why=f"the service is busy: {text}")
        case Code.DEADLINE_EXCEEDED:
            return e.CallTimeoutError(what=what, waited_s=waited_s, peer=address)
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            return e.AuthenticationError(peer=address, why=text)
        case Code.INVALID_ARGUMENT:
            return e.InvalidRequestError(text)
        case code:
            return e.InternalError(what=f"{what}: {code.name} {text}")
