"""Which peers each server of a real service admits, and which it refuses."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane import (
    AuthenticationError,
    DataPlaneConfig,
    ProtocolVersionError,
    Server,
    ServiceUnavailableError,
    StorageUnitError,
    TlsError,
    connect,
    connect_async,
    serve,
)
from dataplane.client.rpc import handshake
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import commands as c
from dataplane.protocol import server_keys, zmq_frames
from dataplane.protocol import tls as tls_module
from dataplane.protocol.controller_socket import zmq_address_of
from dataplane.protocol.pb import bulk_pb2, control_pb2_grpc
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.proof import Ticket
from dataplane.protocol.server_keys import ConnectionKeys, keys_of
from dataplane.protocol.zap import ServerKeys, present
from dataplane.storage.arena_record import discard
from dataplane.storage.transport import connection as bulk_wire
from dataplane.storage.unit import StorageUnit
from tests.conftest import litter, our_files
from tests.contract.conftest import Blocking
from tests.restarts import CONFIG, RestartableService
from tests.secure import tls

pytestmark = pytest.mark.integration

WAIT_S = 60.0
TOKEN = "open-sesame-7f3a"
SERVICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "token": {"token": TOKEN},
    "tls": tls(),
    "tls and token": {"token": TOKEN, **tls()},
}
CLIENTS = {
    **SERVICES,
    "wrong token": {"token": "open-sesame-7f3b"},
    "tls and wrong token": {"token": "x", **tls()},
    "stranger": {"token": TOKEN, **tls("stranger")},
    "expired": {"token": TOKEN, **tls("expired")},
    "takes strangers": {"token": TOKEN, **tls(authority="other-ca")},
    "wants another": {"token": TOKEN, **tls(tls_server_name="tq.test")},
}
REFUSED: list[tuple[str, str, type[Exception], str]] = [
    ("token", "plain", AuthenticationError, "no token was given.*config.token"),
    ("token", "wrong token", AuthenticationError, "the token is wrong"),
    ("plain", "token", AuthenticationError, "the server there has none.*unset this client's token"),
    ("plain", "tls", TlsError, "does not use TLS, and this client does.*tls_"),
    ("token", "tls and token", TlsError, "does not use TLS"),
    ("tls", "plain", TlsError, "uses TLS, and this client does not.*tls_cert_file"),
    ("tls", "wrong token", TlsError, "uses TLS"),
    ("tls and token", "token", TlsError, "uses TLS"),
    ("tls and token", "tls", AuthenticationError, "no token was given"),
    ("tls and token", "tls and wrong token", AuthenticationError, "the token is wrong"),
    ("tls and token", "stranger", TlsError, "rejects this client's certificate.*tls_ca_file.*valid"),
    ("tls and token", "expired", TlsError, r"rejects this client's certificate \(certificate has expired\)"),
    ("tls and token", "takes strangers", TlsError, "this client rejects the service's certificate.*tls_ca_file"),
    ("tls and token", "wants another", TlsError, "this client rejects the service's certificate.*tls_server_name"),
]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Server]]:
    """One of each kind, all the time of the module."""
    made: dict[str, Server] = {}
    try:
        for kind, settings in SERVICES.items():
            made[kind] = serve({"capacity_bytes": 8 * MIB, **settings})
        yield made
    finally:
        for server in made.values():
            server.close()


@pytest.fixture(autouse=True, scope="module")
def _found_out_on_a_busy_machine() -> Iterator[None]:
    """Why two ends do not come together is found out however long the other one takes to answer."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tls_module, "DIAGNOSE_S", WAIT_S)
        yield


def put_and_get(client: Any, partition: str) -> None:
    client.register_partition(partition, ["x"], num_samples=2, consumer_tasks=["t"])
    client.put_samples(["a", "b"], partition, {"x": [torch.arange(5), torch.arange(300_000)]})
    meta = client.claim_meta(partition, "t", ["x"], batch_size=2)
    rows = client.get_batch(meta)["x"]
    assert torch.equal(rows[1], torch.arange(300_000))
    client.clear_samples(None, partition)


@pytest.mark.parametrize("style", ["local", "remote", "remote-async"])
@pytest.mark.parametrize("kind", ["tls", "tls and token"])
def test_a_service_with_tls_serves_its_own(services: dict[str, Server], kind: str, style: str) -> None:
    settings = {**SERVICES[kind], "force_remote": style != "local"}
    address = services[kind].address
    client: Any = Blocking(connect_async(address, **settings)) if "async" in style else connect(address, **settings)
    try:
        put_and_get(client, f"{kind} {style}")
    finally:
        client.close()


@pytest.mark.parametrize(("service", "who", "error", "why"), REFUSED)
def test_clients_are_refused_in_time_and_told_why(
    services: dict[str, Server], service: str, who: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        connect(services[service].address, connect_timeout_s=WAIT_S, **CLIENTS[who])


@pytest.mark.parametrize(("service", "who", "error", "why"), REFUSED)
def test_storage_units_are_refused_and_told_why(
    services: dict[str, Server], service: str, who: str, error: type[Exception], why: str
) -> None:
    unit = StorageUnit(DataPlaneConfig(capacity_bytes=MIB, **CLIENTS[who]), services[service].address)
    with pytest.raises(error, match=why):
        unit.start()


@pytest.mark.parametrize("shown", [None, "open-sesame-7f3b"])
def test_the_grpc_server_refuses_the_same(services: dict[str, Server], shown: str | None) -> None:
    metadata = (("authorization", f"Bearer {shown}"),) if shown else ()
    with grpc.insecure_channel(services["token"].address) as channel, pytest.raises(grpc.RpcError) as caught:
        asked(channel, "OpenSession", opening_message(), metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def asked(channel: grpc.Channel, method: str, request: Any, metadata: Any = ()) -> Any:
    control = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
    return getattr(control, method)(request, metadata=metadata, timeout=WAIT_S)


def opening_message(version: int = PROTOCOL_VERSION) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(nonce=secrets.token_hex(8), host="h", name="n", protocol_version=version)


def test_any_grpc_library_gets_in_with_a_certificate(services: dict[str, Server]) -> None:
    files = {name: Path(path).read_bytes() for name, path in tls().items()}
    credentials = grpc.ssl_channel_credentials(files["tls_ca_file"], files["tls_key_file"], files["tls_cert_file"])
    with grpc.secure_channel(services["tls"].address, credentials) as channel:
        assert asked(channel, "OpenSession", opening_message()).opened.session > 0
        shown = (("tq-nonce", secrets.token_hex(32)), ("tq-protocol-version", str(PROTOCOL_VERSION)))
        given = asked(channel, "GetKeys", pb.GetKeysRequest(), shown)
        assert len(given.curve_key) == 40
        assert given.secret
    with (
        grpc.secure_channel(services["tls"].address, grpc.ssl_channel_credentials(files["tls_ca_file"])) as channel,
        pytest.raises(grpc.RpcError),
    ):
        asked(channel, "GetKeys", pb.GetKeysRequest())


# --- names in certificates


def test_a_certificate_may_be_for_a_name_that_is_not_the_host() -> None:
    named = tls("named", tls_server_name="tq.test")
    with serve({"capacity_bytes": MIB, **named}) as server:
        with pytest.raises(TlsError, match=r"tq\.test|127\.0\.0\.1"):
            connect(server.address, **tls("named"))
        with connect(server.address, **named) as client:
            client.stats()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (tls() | {"tls_ca_file": "/nowhere.pem"}, "tls_ca_file '/nowhere.pem' is unusable: No such file"),
        (tls() | {"tls_key_file": tls("stranger")["tls_key_file"]}, "is unusable: KEY_VALUES_MISMATCH"),
        (tls() | {"tls_ca_file": tls()["tls_key_file"]}, "tls_ca_file .* is unusable"),
    ],
)
def test_files_that_cannot_be_used_are_named_by_service_unit_and_client(
    services: dict[str, Server], settings: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Controller(DataPlaneConfig(**settings)).start()
    with pytest.raises(ValueError, match=why):
        StorageUnit(DataPlaneConfig(capacity_bytes=MIB, **settings), services["tls"].address).start()
    with pytest.raises(ValueError, match=why):
        connect(services["tls"].address, **settings)


def test_what_one_cannot_see_of_ones_own_certificate_is_told_with_both_reasons() -> None:
    """It is good by this side's own files and clock."""
    why = tls_module._rejected(DataPlaneConfig(**tls("stranger", "other-ca")).tls)
    assert why.startswith("the service rejects this client's certificate: ")
    assert "signed by an authority" in why
    assert "valid by its clock" in why


def test_nobody_at_the_address_is_told_at_once() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1: cannot connect"):
        connect("127.0.0.1:1", connect_timeout_s=600.0, **tls())


def test_a_host_that_takes_no_connection_is_not_said_to_listen() -> None:
    """As one behind a firewall. One whose backlog is full says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, socket.create_connection(silent.getsockname()):
        assert select.select([silent], [], [], 60)[0]
        with pytest.raises(ServiceUnavailableError, match=r"cannot connect to it: .* timed out; .* firewall") as caught:
            connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_who_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServiceUnavailableError, match="in time"):
        connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2, **tls())


# --- ZMQ


def endpoint_of_unit(server: Server, **settings: Any) -> str:
    with connect(server.address, **settings) as client:
        client.stats()
        return next(each for each in units_of(client)[0].endpoints if each.startswith("tcp"))


def units_of(client: Any) -> tuple[c.UnitInfo, ...]:
    return client._connections.get()._channel.units  # type: ignore[no-any-return]


def heard(endpoint: str, frames: list[bytes], ticket: Ticket | None = None, curve_key: str = "") -> bool:
    """Whether what listens there says anything to a peer; False once it has hung up."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        present(peer, ticket, curve_key)
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        peer.connect(endpoint)
        with contextlib.suppress(zmq.Again):  # it may have been hung up on by now
            peer.send_multipart(frames, zmq.NOBLOCK)
        ready = dict(zmq.zmq_poll([(peer, zmq.POLLIN), (monitor, zmq.POLLIN)], int(WAIT_S * 1000)))
        assert ready, "neither answered nor hung up on"
        if monitor in ready:
            recv_monitor_message(monitor)
        peer.disable_monitor()
        monitor.close()
        return peer in ready


def hello() -> list[bytes]:
    item = c.OpenSession(nonce=secrets.token_hex(8), host="h", name="n", protocol_version=PROTOCOL_VERSION)
    return zmq_frames.request(item)


def own_keys(address: str, **settings: Any) -> ConnectionKeys:
    config = DataPlaneConfig(**settings)
    return keys_of(address, config.secret(), config.tls, deadline=time.monotonic() + WAIT_S)


def attach() -> list[bytes]:
    return [bulk_pb2.BulkRequest(protocol_version=PROTOCOL_VERSION, session=1, call=1).SerializeToString()]


@pytest.mark.parametrize("endpoint", ["controller", "unit"])
@pytest.mark.parametrize("key", ["", "wrong"])
def test_zmq_servers_of_a_service_with_tls_say_nothing_without_the_key(
    services: dict[str, Server], endpoint: str, key: str
) -> None:
    server = services["tls"]
    curve_key = ServerKeys().public if key else ""
    ticket = own_keys(server.address, **tls()).ticket
    if endpoint == "controller":
        assert not heard(f"tcp://{zmq_address_of(server.address)}", hello(), ticket, curve_key)
        return
    assert not heard(endpoint_of_unit(server, **tls()), attach(), ticket, curve_key)


@pytest.mark.parametrize("secret", ["", "wrong"])
def test_the_key_without_the_ticket_opens_nothing(services: dict[str, Server], secret: str) -> None:
    """Also where the service has no token."""
    server = services["tls"]
    own = own_keys(server.address, **tls())
    assert heard(f"tcp://{zmq_address_of(server.address)}", hello(), own.ticket, own.curve_key)
    assert not heard(f"tcp://{zmq_address_of(server.address)}", hello(), Ticket.of(secret, "x"), own.curve_key)
    with connect(server.address, force_remote=True, **tls()) as client:
        unit_connections = client._connections.get().session_state.connections
        unit_connections._config = replace(unit_connections._config, token=secret or None)
        client.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(AuthenticationError, match="storage unit"):
            client.put_samples(["a"], "p", {"x": torch.ones(1, 4)})


@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize("endpoint", ["grpc", "controller", "unit"])
def test_whatever_a_stranger_sends_to_a_port_changes_nothing(
    services: dict[str, Server], kind: str, endpoint: str
) -> None:
    server = services[kind]
    unit = endpoint_of_unit(server, **SERVICES[kind]).removeprefix("tcp://")
    where = {"grpc": server.address, "controller": zmq_address_of(server.address), "unit": unit}[endpoint]
    host, _, port = where.rpartition(":")
    for noise in (b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(4096)):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as peer:
            peer.sendall(noise)
    with connect(server.address, force_remote=True, **SERVICES[kind]) as client:
        put_and_get(client, f"{kind} {endpoint}")


@pytest.mark.parametrize("who", ["service", "unit", "client"])
def test_a_zmq_without_curve_is_named(services: dict[str, Server], monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: False)
    address = services["tls"].address
    start: dict[str, Callable[[], Any]] = {
        "service": lambda: Controller(DataPlaneConfig(**tls())).start(),
        "unit": lambda: StorageUnit(DataPlaneConfig(capacity_bytes=MIB, **tls()), address).start(),
        "client": lambda: connect(address, **tls()),
    }
    before = our_files()
    with pytest.raises(TlsError, match="libzmq with CURVE"):
        start[who]()
    assert not litter(before)


# --- versions of the protocol


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1], ids=["older", "newer"])
@pytest.mark.parametrize("endpoint", ["keys", "zmq", "grpc", "storage unit", "bulk"])
def test_another_version_of_the_protocol_is_refused_with_both_named(
    services: dict[str, Server], monkeypatch: pytest.MonkeyPatch, endpoint: str, version: int
) -> None:
    both = rf"client has protocol version {version}, the service has {PROTOCOL_VERSION}"
    kind = "tls" if endpoint == "keys" else "plain"
    if endpoint == "grpc":
        with grpc.insecure_channel(services[kind].address) as channel, pytest.raises(grpc.RpcError, match=both):
            asked(channel, "OpenSession", opening_message(version))
        return
    module = {"keys": server_keys, "zmq": handshake, "storage unit": server_keys, "bulk": bulk_wire}[endpoint]
    monkeypatch.setattr(module, "PROTOCOL_VERSION", version)
    with pytest.raises(ProtocolVersionError, match=both) as caught:
        use(services[kind], endpoint, kind)
    assert (caught.value.client_version, caught.value.service_version) == (version, PROTOCOL_VERSION)


def use(server: Server, endpoint: str, kind: str) -> None:
    if endpoint == "storage unit":
        StorageUnit(DataPlaneConfig(capacity_bytes=MIB), server.address).start()
    with connect(server.address, **SERVICES[kind]) as client:
        put_and_get(client, "versions")


# --- new keys with every start


@pytest.mark.parametrize("style", ["local", "remote", "remote-async"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_clients_and_units_go_on_with_a_service_that_has_new_keys(
    tmp_path: Path, style: str, token: str | None
) -> None:
    config = replace(CONFIG, token=token, **tls())
    restartable = RestartableService(tmp_path / "state", config)
    restartable.start()
    restartable.unit(state_dir=str(tmp_path / "state"))
    settings = {**vars(replace(config, force_remote=style != "local")), "address": restartable.address}
    address = settings.pop("address")
    client: Any = Blocking(connect_async(address, **settings)) if "async" in style else connect(address, **settings)
    try:
        put_and_get(client, "before")
        before = own_keys(restartable.address, token=token, **tls())
        restartable.restart()
        put_and_get(client, "another controller")
        after = own_keys(restartable.address, token=token, **tls())
        assert before.curve_key != after.curve_key
        assert before.ticket != after.ticket
        assert before.secret == after.secret
        restartable.units.pop().stop()
        restartable.unit(state_dir=str(tmp_path / "state"))
        put_and_get(client, "another unit")
    finally:
        client.close()
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])


# --- what is told


def test_no_secret_is_in_a_log_a_repr_or_an_error(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    config = DataPlaneConfig(token=TOKEN, capacity_bytes=8 * MIB, **tls())
    told = [repr(config)]
    with serve(config) as server, connect(server.address, token=TOKEN, force_remote=True, **tls()) as client:
        put_and_get(client, "p")
        channel = client._connections.get()._channel
        session = channel._calls.session
        told += [repr(part) for part in (server, client, channel, session, channel.unit_config, client.stats())]
        for wrong in ("open-sesame", TOKEN + "x"):
            with pytest.raises(AuthenticationError) as refused:
                connect(server.address, token=wrong, **tls())
            told += [repr(refused.value), str(refused.value), str(refused.value.facts)]
            assert wrong not in told[-1]
        with pytest.raises(TlsError) as plain:
            connect(server.address, token=TOKEN, connect_timeout_s=60.0)
        told += [repr(plain.value), str(plain.value)]
        curve_key = session.keys.curve_key
        client.register_partition("q", ["x"], None, ["t"])
        client.put_samples(["a"], "q", {"x": torch.ones(1, 4)})
        server._units[0].stop()
        with pytest.raises(StorageUnitError) as lost:
            client.get_samples(["a"], "q", ["x"])
        told += [repr(lost.value)]
    told += [record.getMessage() + str(record.exc_info) for record in caplog.records]
    told += capfd.readouterr()
    for text in told:
        assert TOKEN not in text
        assert curve_key not in text
