"""The gRPC stream between a storage unit and the controller."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from dataplane.config import TlsFiles
from dataplane.core.addresses import split_address
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.grpc_status import from_status
from dataplane.protocol.pb import control_pb2_grpc
from dataplane.protocol.server_keys import VERSION_KEY, ConnectionKeys
from dataplane.protocol.tls import channel_credentials, diagnose
from dataplane.protocol.zmq_frames import MAX_MESSAGE_BYTES

OPTIONS = (
    # Connections to a controller in the same cluster must not use the HTTP proxy that is configured for downloads.
    ("grpc.enable_http_proxy", 0),
    # A new channel must not inherit the reconnect backoff of an earlier one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class GrpcLink:
    """One stream to the controller. It sends the items of `reports`, an `AddUnit` first, and yields the controller's
    orders. keys: the proven keys of the service at `address`.

    Raises ValueError for unusable files of `tls`.
    """

    def __init__(self, address: str, keys: ConnectionKeys, reports: Iterator[c.Input], tls: TlsFiles | None) -> None:
        self._address = address
        self._tls = tls
        self._channel = _channel(address, keys.address, tls)
        metadata = [(VERSION_KEY, str(PROTOCOL_VERSION))]
        if keys.ticket:
            metadata.append(("authorization", f"Bearer {keys.ticket.code}"))
        stub = control_pb2_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._since = time.monotonic()
        self._call = stub.AttachUnit(map(codec.report_to_pb, reports), metadata=metadata)

    def orders(self) -> Iterator[c.Output]:
        """Yield `UnitAdded`, then orders, until the stream ends. Raises the error that ended the stream."""
        try:
            for wire in self._call:
                yield codec.order_from_pb(wire)
        except grpc.RpcError as error:
            waited_s = time.monotonic() - self._since
            reason: Exception = from_status(error, address=self._address, what="AttachUnit", waited_s=waited_s)
            if isinstance(reason, ServiceUnavailableError):
                # A failed TLS handshake has this status, too; a trial connection finds its reason.
                reason = diagnose(self._address, self._tls) or reason
            raise reason from error

    def close(self) -> None:
        """End the stream if it is still open."""
        self._call.cancel()
        self._channel.close()


def _channel(address: str, reached: str, tls: TlsFiles | None) -> grpc.Channel:
    """Open a channel to `reached`. The service's certificate must match the host in `address`, or the name in `tls`."""
    if tls is None:
        return grpc.insecure_channel(reached, options=OPTIONS)
    host = split_address(address)[0]
    expected_name = tls.server_name
    if not expected_name and host != split_address(reached)[0]:  # `reached` has, for example, the IP address of `host`
        expected_name = host
    override = (("grpc.ssl_target_name_override", expected_name),) if expected_name else ()
    return grpc.secure_channel(reached, channel_credentials(tls), options=(*OPTIONS, *override))
