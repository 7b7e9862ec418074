"""Conversion of errors to gRPC statuses. Each error class names its status."""

from __future__ import annotations

import grpc

from dataplane import errors as e
from dataplane.protocol.pb import control_pb2 as pb

DETAILS_KEY = "tq-error-bin"
"""Key of the trailing metadata with a serialized `Error`."""
MAX_DETAIL_BYTES = 4096
"""Maximum size of an error's facts, because gRPC rejects trailers beyond 8 KiB. A longer error is sent as its
status and the start of its text."""


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
