"""Which peers each server of a real service admits, and which it refuses."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
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
    connect,
    connect_async,
    serve,
)
from dataplane.client.rpc import handshake
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.auth import KeyPair, Ticket, controller_keys
from dataplane.protocol.pb import bulk_pb2, control_pb2_grpc
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.zap import present
from dataplane.storage import controller_link
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
    "encrypted": {"token": TOKEN, "encrypt_rows": True},
}
CLIENTS: dict[str, dict[str, Any]] = {"plain": {}, "token": {"token": TOKEN}, "wrong token": {"token": TOKEN + "x"}}
REFUSED: list[tuple[str, str, str]] = [
    ("token", "plain", "no token was given.*config.token"),
    ("token", "wrong token", "the token is wrong"),
    ("encrypted", "wrong token", "the token is wrong"),
    ("plain", "token", "the server there has none.*unset this client's token"),
]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Server]]:
    """One of each kind, all the time of the module."""
    made: dict[str, Server] = {}
    try:
        for kind, settings in SERVICES.items():
            made[kind] = serve({"capacity_bytes": 8 * MIB, "grpc_port": 0, **settings})
        yield made
    finally:
        for server in made.values():
            server.close()


def put_and_get(client: Any, partition: str) -> None:
    client.register_partition(partition, ["x"], num_samples=2, consumer_tasks=["t"])
    client.put_samples(["a", "b"], partition, {"x": [torch.arange(5), torch.arange(300_000)]})
    meta = client.claim_meta(partition, "t", ["x"], batch_size=2)
    rows = client.get_batch(meta)["x"]
    assert torch.equal(rows[1], torch.arange(300_000))
    client.clear_samples(None, partition)


@pytest.mark.parametrize("style", ["local", "remote", "remote-async"])
@pytest.mark.parametrize("kind", ["token", "encrypted"])
def test_a_service_with_a_token_serves_its_own(services: dict[str, Server], kind: str, style: str) -> None:
    settings = {"token": TOKEN, "force_remote": style != "local"}
    address = services[kind].address
    client: Any = Blocking(connect_async(address, **settings)) if "async" in style else connect(address, **settings)
    try:
        put_and_get(client, f"{kind} {style}")
    finally:
        client.close()


@pytest.mark.parametrize(("service", "who", "why"), REFUSED)
def test_clients_are_refused_in_time_and_told_why(
    services: dict[str, Server], service: str, who: str, why: str
) -> None:
    with pytest.raises(AuthenticationError, match=why):
        connect(services[service].address, connect_timeout_s=WAIT_S, **CLIENTS[who])


@pytest.mark.parametrize(("service", "who", "why"), REFUSED)
def test_storage_units_are_refused_and_told_why(services: dict[str, Server], service: str, who: str, why: str) -> None:
    unit = StorageUnit(DataPlaneConfig(capacity_bytes=MIB, **CLIENTS[who]), services[service].address)
    with pytest.raises(AuthenticationError, match=why):
        unit.start()


@pytest.mark.parametrize("shown", [None, "open-sesame-7f3b"])
def test_the_grpc_gateway_refuses_the_same(services: dict[str, Server], shown: str | None) -> None:
    metadata = (("authorization", f"Bearer {shown}"),) if shown else ()
    with grpc.insecure_channel(services["token"].grpc_address) as channel, pytest.raises(grpc.RpcError) as caught:
        asked(channel, "OpenSession", opening_message(), metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def asked(channel: grpc.Channel, method: str, request: Any, metadata: Any = ()) -> Any:
    control = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
    return getattr(control, method)(request, metadata=metadata, timeout=WAIT_S)


def opening_message(version: int = PROTOCOL_VERSION) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(nonce=secrets.token_hex(8), host="h", name="n", protocol_version=version)


@pytest.mark.parametrize("authority", [True, False])
def test_any_grpc_library_gets_in_over_tls(authority: bool) -> None:
    files = tls()
    if not authority:
        files.pop("tls_ca_file")
    read = {name: Path(path).read_bytes() for name, path in tls().items()}
    with_certificate = grpc.ssl_channel_credentials(read["tls_ca_file"], read["tls_key_file"], read["tls_cert_file"])
    without = grpc.ssl_channel_credentials(read["tls_ca_file"])
    shown = (("authorization", f"Bearer {TOKEN}"),)
    with serve({"capacity_bytes": MIB, "token": TOKEN, "grpc_port": 0, **files}) as server:
        with grpc.secure_channel(server.grpc_address, with_certificate) as channel:
            assert asked(channel, "OpenSession", opening_message(), shown).opened.session > 0
        with grpc.secure_channel(server.grpc_address, without) as channel:
            if authority:
                with pytest.raises(grpc.RpcError):
                    asked(channel, "OpenSession", opening_message(), shown)
            else:
                assert asked(channel, "OpenSession", opening_message(), shown).opened.session > 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (tls() | {"tls_ca_file": "/nowhere.pem"}, "tls_ca_file '/nowhere.pem' is unusable: No such file"),
        (tls() | {"tls_key_file": tls("stranger")["tls_key_file"]}, "is unusable: KEY_VALUES_MISMATCH"),
        (tls() | {"tls_ca_file": tls()["tls_key_file"]}, "tls_ca_file .* is unusable"),
        ({"tls_ca_file": tls()["tls_ca_file"]}, "tls_ca_file requires tls_cert_file and tls_key_file"),
        ({"encrypt_rows": True}, "encrypt_rows requires a token"),
    ],
)
@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], why: str, port: str) -> None:
    with pytest.raises(ValueError, match=why):
        Controller(DataPlaneConfig(**settings, **{port: 0})).start()


def test_a_unit_names_settings_that_it_cannot_use(services: dict[str, Server]) -> None:
    with pytest.raises(ValueError, match="encrypt_rows requires a token"):
        StorageUnit(DataPlaneConfig(capacity_bytes=MIB, encrypt_rows=True), services["plain"].address).start()


# --- who is not there


def test_nobody_at_the_address_is_told_at_once() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1: cannot connect"):
        connect("127.0.0.1:1", connect_timeout_s=600.0)


def test_a_host_that_takes_no_connection_is_not_said_to_listen() -> None:
    """As one behind a firewall. One whose backlog is full says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, socket.create_connection(silent.getsockname()):
        assert select.select([silent], [], [], 60)[0]
        with pytest.raises(ServiceUnavailableError, match=r"cannot connect to it: .* timed out; .* firewall") as caught:
            connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2)
    assert isinstance(caught.value.__cause__, TimeoutError)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_who_does_not_answer_is_given_up_in_time(token: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServiceUnavailableError, match="in time"):
        connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2, token=token)


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


def attach() -> list[bytes]:
    return [bulk_pb2.BulkRequest(protocol_version=PROTOCOL_VERSION, session=1, call=1).SerializeToString()]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_the_controller_says_nothing_to_peers_without_its_key(services: dict[str, Server], key: str) -> None:
    endpoint = f"tcp://{services['token'].address}"
    assert heard(endpoint, hello(), curve_key=controller_keys(TOKEN).public)
    assert not heard(endpoint, hello(), curve_key=KeyPair.new().public if key else "")


@pytest.mark.parametrize("kind", ["token", "encrypted"])
@pytest.mark.parametrize("secret", ["", "wrong"])
def test_a_unit_says_nothing_to_peers_without_its_ticket(services: dict[str, Server], kind: str, secret: str) -> None:
    with connect(services[kind].address, force_remote=True, token=TOKEN) as client:
        client.stats()
        info = units_of(client)[0]
        endpoint = next(each for each in info.endpoints if each.startswith("tcp"))
        right = Ticket.of(TOKEN, info.arena_path, info.epoch)
        wrong = Ticket.of(secret, info.arena_path, info.epoch)
        assert bool(info.curve_key) == (kind == "encrypted")
        assert heard(endpoint, attach(), right, info.curve_key)
        assert not heard(endpoint, attach(), wrong, info.curve_key)
        assert not heard(endpoint, attach(), right, "" if info.curve_key else KeyPair.new().public)
        if not secret:  # without a token, a client does not come this far
            return
        unit_connections = client._connections.get().session_state.connections
        unit_connections._config = replace(unit_connections._config, token=secret)
        client.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(AuthenticationError, match="storage unit"):
            client.put_samples(["a"], "p", {"x": torch.ones(1, 4)})


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
@pytest.mark.parametrize("endpoint", ["grpc", "controller", "unit"])
def test_whatever_a_stranger_sends_to_a_port_changes_nothing(
    services: dict[str, Server], kind: str, endpoint: str
) -> None:
    server = services[kind]
    unit = endpoint_of_unit(server, **SERVICES[kind]).removeprefix("tcp://")
    where = {"grpc": server.grpc_address, "controller": server.address, "unit": unit}[endpoint]
    host, _, port = where.rpartition(":")
    for noise in (b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(4096)):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as peer:
            peer.sendall(noise)
    with connect(server.address, force_remote=True, **SERVICES[kind]) as client:
        put_and_get(client, f"{kind} {endpoint}")


@pytest.mark.parametrize("who", ["service", "unit", "client"])
def test_a_zmq_without_curve_is_named(services: dict[str, Server], monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: False)
    controller_keys.cache_clear()
    address = services["token"].address
    start: dict[str, Callable[[], Any]] = {
        "service": lambda: Controller(DataPlaneConfig(token=TOKEN)).start(),
        "unit": lambda: StorageUnit(DataPlaneConfig(capacity_bytes=MIB, token=TOKEN), address).start(),
        "client": lambda: connect(address, token=TOKEN),
    }
    before = our_files()
    with pytest.raises(ValueError, match="libzmq with CURVE"):
        start[who]()
    assert not litter(before)


# --- versions of the protocol


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1], ids=["older", "newer"])
@pytest.mark.parametrize("endpoint", ["zmq", "grpc", "storage unit", "bulk"])
def test_another_version_of_the_protocol_is_refused_with_both_named(
    services: dict[str, Server], monkeypatch: pytest.MonkeyPatch, endpoint: str, version: int
) -> None:
    both = rf"client has protocol version {version}, the service has {PROTOCOL_VERSION}"
    server = services["plain"]
    if endpoint == "grpc":
        with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError, match=both):
            asked(channel, "OpenSession", opening_message(version))
        return
    module = {"zmq": handshake, "storage unit": controller_link, "bulk": bulk_wire}[endpoint]
    monkeypatch.setattr(module, "PROTOCOL_VERSION", version)
    with pytest.raises(ProtocolVersionError, match=both) as caught:
        use(server, endpoint)
    assert (caught.value.client_version, caught.value.service_version) == (version, PROTOCOL_VERSION)


def use(server: Server, endpoint: str) -> None:
    if endpoint == "storage unit":
        StorageUnit(DataPlaneConfig(capacity_bytes=MIB), server.address).start()
    with connect(server.address) as client:
        put_and_get(client, "versions")


# --- restarts


@pytest.mark.parametrize("style", ["local", "remote", "remote-async"])
@pytest.mark.parametrize("encrypt_rows", [True, False])
def test_clients_and_units_go_on_after_restarts(tmp_path: Path, style: str, encrypt_rows: bool) -> None:
    config = replace(CONFIG, token=TOKEN, encrypt_rows=encrypt_rows)
    restartable = RestartableService(tmp_path / "state", config)
    restartable.start()
    restartable.unit(state_dir=str(tmp_path / "state"))
    settings = {**vars(replace(config, force_remote=style != "local")), "address": restartable.address}
    address = settings.pop("address")
    client: Any = Blocking(connect_async(address, **settings)) if "async" in style else connect(address, **settings)
    try:
        put_and_get(client, "before")
        restartable.restart()
        put_and_get(client, "another controller")
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
    config = DataPlaneConfig(token=TOKEN, capacity_bytes=8 * MIB, encrypt_rows=True, grpc_port=0)
    told = [repr(config)]
    with serve(config) as server, connect(server.address, token=TOKEN, force_remote=True) as client:
        put_and_get(client, "p")
        channel = client._connections.get()._channel
        session = channel._calls.session
        told += [repr(part) for part in (server, client, channel, session, channel.unit_config, client.stats())]
        for wrong in ("open-sesame", TOKEN + "x"):
            with pytest.raises(AuthenticationError) as refused:
                connect(server.address, token=wrong)
            told += [repr(refused.value), str(refused.value), str(refused.value.facts)]
            assert wrong not in told[-1]
        keys = controller_keys(TOKEN)
        told.append(repr(keys))
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
        assert keys.secret not in text
        assert keys.public not in text
