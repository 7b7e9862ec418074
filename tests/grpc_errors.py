"""Errors of the gRPC server, as a client in any language reads them."""

from __future__ import annotations

import grpc

from dataplane.errors import DataPlaneError, from_wire
from dataplane.protocol.grpc_status import DETAILS_KEY
from dataplane.protocol.pb import control_pb2 as pb


def error_of(failed: grpc.RpcError) -> DataPlaneError:
    """The error in the trailer of a failed call."""
    assert isinstance(failed, grpc.Call)
    details = pb.Error.FromString(dict(failed.trailing_metadata())[DETAILS_KEY])
    return from_wire(details.name, details.facts)
