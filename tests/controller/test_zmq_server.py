"""The ZMQ server: what a command costs in messages and conversions, and in what order ends of connections are told."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from dataplane import connect, serve
from dataplane.client.rpc import handshake, pending_calls
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import DataPlaneConfig
from dataplane.controller import controller as controller_module
from dataplane.controller import zmq_server
from dataplane.controller.controller import Controller
from dataplane.controller.event_loop import LedgerThread
from dataplane.controller.requests import Facts, Reply, frame_of
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core import zmq_io
from dataplane.core.addresses import split_address
from dataplane.errors import InvalidRequestError, ServiceUnavailableError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket, dealer_socket
from tests.controller.service import ScriptedLedger
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day
from tests.ports import free_ports
from tests.tls_hello import hello

pytestmark = pytest.mark.integration


WAIT_MS = 20_000
CALLS = 20


class Taken:
    """A handler that keeps what it is given."""

    min_heartbeat_s = 0.0

    def __init__(self) -> None:
        self.items: list[c.Input] = []

    def handle(self, item: c.Input, reply: Reply | None, *, caller: object, record: bytes | None = None) -> None:
        self.items.append(item)


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    server = ZmqServer("127.0.0.1", 0)
    server.introduce(Facts(address="here:1", epoch=1, host="host", endpoints=server.endpoints, heartbeat_s=1.0))
    yield server
    server.close()


@pytest.fixture
def dealer(server: ZmqServer) -> Iterator[Socket]:
    context: zmq.Context[Socket] = zmq.Context()
    dealer = dealer_socket(context, server.endpoints[0])
    yield dealer
    dealer.close()
    context.term()


def seal(call_id: int) -> list[bytes]:
    return zmq_frames.request(c.Call(session=3, call_id=call_id, watermark=1, command=c.Seal(partition="p")))


def test_one_message_is_handled_at_a_time(server: ZmqServer, dealer: Socket) -> None:
    taken = Taken()
    assert not server.serve(taken)
    for call_id in (1, 2):
        dealer.send_multipart(seal(call_id))
    for count in (1, 2):
        assert server.socket.poll(WAIT_MS)
        assert server.serve(taken)
        assert len(taken.items) == count
    assert not server.serve(taken)


def test_the_end_of_a_connection_is_told_after_what_came_through_it(server: ZmqServer, dealer: Socket) -> None:
    taken = Taken()
    dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
    for call_id in (1, 2):
        dealer.send_multipart(seal(call_id))
    dealer.close(linger=WAIT_MS)
    while not any(isinstance(item, c.SessionSilent) for item in taken.items):
        assert server.monitor.poll(WAIT_MS)
        server.notice_disconnects(taken)
    assert [type(item) for item in taken.items] == [c.Heartbeat, c.Call, c.Call, c.SessionSilent]


def test_the_end_of_a_connection_is_not_told_before_what_came_just_before_it(
    server: ZmqServer, dealer: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes in the middle of a look."""
    taken = Taken()
    real, told = zmq_server.receive_event, list[tuple[int, int]]()

    def ends_now(_: Any) -> bool:
        if not dealer.closed:
            dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
            dealer.close(linger=WAIT_MS)
            while not told or told[-1][0] != zmq.EVENT_DISCONNECTED:
                assert server.monitor.poll(WAIT_MS)
                told.append(real(server.monitor))
        return bool(told)

    monkeypatch.setattr(zmq_server, "readable", ends_now)
    monkeypatch.setattr(zmq_server, "receive_event", lambda _: told.pop(0))
    server.notice_disconnects(taken)
    assert [type(item) for item in taken.items] == [c.Heartbeat, c.SessionSilent]


def test_the_end_of_an_earlier_connection_with_the_same_descriptor_is_not_the_end_of_a_session(
    server: ZmqServer, dealer: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken()
    dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
    assert server.socket.poll(WAIT_MS)
    assert server.serve(taken)
    (descriptor,) = server._session_of
    events: list[tuple[int, int]] = []
    monkeypatch.setattr(zmq_server, "readable", lambda _: bool(events))
    monkeypatch.setattr(zmq_server, "receive_event", lambda _: events.pop(0))

    def told_of(*kinds: int) -> list[type]:
        taken.items.clear()
        events.extend((kind, descriptor) for kind in kinds)
        server.notice_disconnects(taken)
        return [type(item) for item in taken.items]

    # A client probes the port, closes that connection and connects again. Its heartbeat is read before these events.
    assert told_of(zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED) == []
    # No heartbeat came since. So the connection that ended is the session's, whoever has the descriptor now.
    assert told_of(zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED) == [c.SessionSilent]


def test_a_call_is_one_message_and_one_conversion_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()  # of what was done; whole once the controller has ended

    def count(module: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            counts[what] += 1
            return result

        monkeypatch.setattr(module, name, counted)

    for module, name in ((pending_calls, "RESEND_S"), (handshake, "IPC_WAIT_S"), (handshake, "REPEAT_S")):
        monkeypatch.setattr(module, name, 600.0)  # nothing is said twice, nor once more by TCP, on a slow machine
    quiet = DataPlaneConfig(port=0, heartbeat_s=600.0, session_timeout_s=6000.0)
    with Controller(quiet) as controller:
        client = ControllerChannel.open(DataPlaneConfig(address=controller.address, heartbeat_s=600.0))
        client.call(c.Units())
        count(ZmqServer, "_handle_request", "requests received")
        count(ZmqServer, "_send", "replies sent")
        count(messages, "decode_request", "requests read")
        count(zmq_server, "frame_of", "replies written")
        count(zmq_io, "send", "requests sent")
        count(zmq_frames, "decode_reply", "replies received")
        count(zmq_frames, "request", "requests written")
        count(messages, "decode_result", "replies read")
        for _ in range(CALLS):
            client.call(c.Units())
        monkeypatch.undo()
        client.close()
    assert counts == dict.fromkeys(
        (
            "requests written",
            "requests sent",
            "requests received",
            "requests read",
            "replies written",
            "replies sent",
            "replies received",
            "replies read",
        ),
        CALLS,
    )


def test_a_tls_handshake_is_named_in_the_log(server: ZmqServer, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(hello())
        assert server.socket.poll(WAIT_MS)
        assert server.serve(Taken())
    (line,) = caplog.messages
    assert line.startswith("Rejected a request: it looks like a TLS handshake")


def test_bytes_of_another_protocol_are_escaped_in_the_log(
    server: ZmqServer, dealer: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    dealer.send_multipart([b"\xc2\x1b[2J" * 100])
    assert server.socket.poll(WAIT_MS)
    assert server.serve(Taken())
    (line,) = caplog.messages
    assert line.startswith("Rejected a request: malformed request: ")
    assert line.isprintable()
    assert len(line) < 200


def test_a_crowd_finds_space_in_the_queue_of_the_port() -> None:
    """A client connects twice: a thousand that come in one second must not be turned away by the kernel."""
    server = ZmqServer("127.0.0.1", 0)
    try:
        most = int(Path("/proc/sys/net/core/somaxconn").read_text())
        assert queue_of_port(server.port) == min(4096, most)
    finally:
        server.close()


def queue_of_port(port: int) -> int:
    """How many connections to a port of this process may wait to be taken."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue  # a copy of it would stay open
            with socket.socket(fileno=os.dup(int(name))) as listener:
                if listener.family == socket.AF_INET and listener.getsockname()[1] == port:
                    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
                    return int.from_bytes(info[28:32], "little")  # tcpi_sacked: of a listener its backlog
    raise AssertionError(f"nothing of this process listens on port {port}")


# --- Requests that share a message, and replies that share one: each has the outcome that it has
# alone.


class Link:
    """A service whose ledger runs in this thread, and one socket for each session."""

    def __init__(self) -> None:
        self.server = ZmqServer("127.0.0.1", 0)
        self.facts = Facts(address="here:1", epoch=7, host="host", endpoints=self.server.endpoints, heartbeat_s=1.0)
        self.server.introduce(self.facts)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._dealers: dict[int, Socket] = {}

    def dealer(self, session: int) -> Socket:
        if session not in self._dealers:
            self._dealers[session] = dealer_socket(self._context, self.server.endpoints[0])
        return self._dealers[session]

    def serve(self, shell: LedgerThread, session: int, messages: list[list[bytes]]) -> None:
        """Send the messages and have them handled."""
        for frames in messages:
            self.dealer(session).send_multipart(frames)
        for _ in messages:
            assert self.server.socket.poll(WAIT_MS)
            assert self.server.serve(shell)

    def replies(self, session: int, count: int) -> list[list[zmq_frames.Reply]]:
        """The replies of each message that came, until they are `count`."""
        came: list[list[zmq_frames.Reply]] = []
        while sum(map(len, came)) < count:
            assert self.dealer(session).poll(WAIT_MS)
            came.append(zmq_frames.Reply.parse(self.dealer(session).recv_multipart()))
        return came

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.server.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def as_reply(output: c.Answer, facts: Facts) -> zmq_frames.Reply:
    return zmq_frames.Reply.parse([frame_of(output, facts)])[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_history_in_shared_messages_has_the_outcome_of_one_in_single_messages(link: Link, seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 200)
    alone = Ledger(7, **driver.settings)
    expected: dict[int, list[zmq_frames.Reply]] = defaultdict(list)
    for item in driver.log:
        for output in alone.apply(item):
            if isinstance(output, c.Answer):
                expected[output.session].append(as_reply(output, link.facts))

    together = Ledger(7, **driver.settings)
    shell = LedgerThread(together, link.server, link.facts, clock=lambda: 0.0)
    chance = random.Random(seed)
    left = list(driver.log)
    while left:
        first = left.pop(0)
        if not isinstance(first, c.Call):
            shell.handle(first, None)
            continue
        calls = [first]
        most = chance.randrange(1, 80)
        while left and isinstance(left[0], c.Call) and left[0].session == first.session and len(calls) < most:
            calls.append(left.pop(0))
        link.serve(shell, first.session, list(zmq_frames.joined(zmq_frames.request(call) for call in calls)))
    assert fingerprint(together) == fingerprint(alone)
    assert expected
    for session, replies in expected.items():
        came = [each for message in link.replies(session, len(replies)) for each in message]
        assert sorted(came, key=repr) == sorted(replies, key=repr)


def seals(*call_ids: int, session: int = 3) -> list[list[bytes]]:
    return [
        zmq_frames.request(c.Call(session=session, call_id=call_id, watermark=1, command=c.Seal(partition="p")))
        for call_id in call_ids
    ]


def test_a_malformed_request_spoils_no_other_of_its_message(link: Link) -> None:
    ledger = ScriptedLedger()
    shell = LedgerThread(ledger, link.server, link.facts)
    mistaken = c.Seal(partition=5)  # type: ignore[arg-type]
    call = zmq_frames.request(c.Call(session=3, call_id=7, watermark=1, command=mistaken))
    (message,) = zmq_frames.joined([*seals(1), call, *seals(2)])
    link.serve(shell, 3, [message])
    (replies,) = link.replies(3, 3)
    assert [reply.call_id for reply in replies] == [1, 7, 2]
    with pytest.raises(InvalidRequestError, match="Seal: partition=5: expected `str`, got `int`"):
        replies[1].good_body()
    assert [call.call_id for call in ledger.of(c.Seal)] == [1, 2]


# --- The controller as a whole: where it listens, what it imports, and that it ends.


CONFIG = DataPlaneConfig(heartbeat_s=0.1)


def test_it_listens_where_it_is_told() -> None:
    port = free_ports(2)
    with Controller(replace(CONFIG, port=port, grpc_port=port + 1)) as controller:
        assert controller.address == f"127.0.0.1:{port}"
        assert controller.grpc_address == f"127.0.0.1:{port + 1}"
        for each in (port, port + 1):
            socket.create_connection(("127.0.0.1", each), timeout=5).close()


@pytest.mark.parametrize("which", [0, 1], ids=["zmq", "grpc"])
def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(which: int) -> None:
    port = free_ports(2)
    config = replace(CONFIG, port=port, grpc_port=port + 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + which))
        taken.listen()
        with pytest.raises(OSError, match=f"cannot listen on 127.*:{port + which}"):
            Controller(config).start()
    with Controller(config):
        pass


def test_two_services_never_share_a_port() -> None:
    with Controller(CONFIG) as first:
        port = split_address(first.address)[1]
        with pytest.raises(OSError, match="cannot listen"):
            Controller(replace(CONFIG, port=port)).start()


def test_beyond_loopback_it_needs_a_token_and_gives_an_address_for_others() -> None:
    with pytest.raises(ValueError, match="a token"):
        Controller(replace(CONFIG, host="0.0.0.0")).start()
    with Controller(replace(CONFIG, host="0.0.0.0", token="secret")) as controller:
        host, port = split_address(controller.address)
        assert host != "0.0.0.0"
        channel = ControllerChannel.open(replace(CONFIG, address=f"127.0.0.1:{port}", token="secret"))
        channel.call(c.Units())
        channel.close()


def test_beyond_loopback_without_any_guard_it_must_be_told_to_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with serve({"host": "0.0.0.0", "insecure": True, "capacity_bytes": 1 << 20}) as server:
        assert [record.message for record in caplog.records if "insecure" in record.message] == [
            "insecure: any client that can connect to 0.0.0.0 can read, change and drop all data of this service"
        ]
        port = split_address(server.address)[1]
        connect(f"127.0.0.1:{port}").close()
    caplog.clear()
    with Controller(replace(CONFIG, insecure=True)):
        assert "insecure" not in caplog.text


def test_stopping_ends_everything_and_answers_parked_calls() -> None:
    ledger = ScriptedLedger(lambda call: None)
    controller = Controller(CONFIG, ledger=ledger, epoch=1).start()
    address = controller.address
    controller.stop()
    controller.stop()
    with pytest.raises(ServiceUnavailableError):
        ControllerChannel.open(replace(CONFIG, address=address))


def test_epochs_grow_from_run_to_run() -> None:
    epochs = []
    for _ in range(2):
        with Controller(CONFIG) as controller:
            channel = ControllerChannel.open(replace(CONFIG, address=controller.address))
            epochs.append(channel.epoch)
            channel.close()
    assert epochs[0] < epochs[1]


def imported_after(code: str) -> set[str]:
    script = code + "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_the_controller_imports_no_torch_and_leaves_the_environment_alone() -> None:
    modules = imported_after(
        "import os; before = dict(os.environ)\n"
        "from dataplane.config import DataPlaneConfig; from dataplane.controller.controller import Controller\n"
        "Controller(DataPlaneConfig()).start().stop()\n"
        "assert dict(os.environ) == before"
    )
    assert "zmq" in modules
    assert not modules & {"grpc", "torch", "tensordict", "ray"}


def test_a_client_imports_no_grpc() -> None:
    modules = imported_after("import dataplane.client.rpc.channel, dataplane.client.rpc.async_channel")
    assert "zmq" in modules
    assert not modules & {"grpc", "torch", "ray"}


def test_a_service_with_state_keeps_its_port(tmp_path: Path) -> None:
    config = DataPlaneConfig(state_dir=str(tmp_path))
    with Controller(config) as first:
        address = first.address
    with Controller(config) as second:
        assert second.address == address
        assert second.recovered
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert int(address.rpartition(":")[2]) + 1 < first_ephemeral


def test_a_port_that_is_taken_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "PORT_WAIT_S", 0.0)
    config = DataPlaneConfig(state_dir=str(tmp_path))
    with Controller(config) as first:
        host, _, port = first.address.rpartition(":")
    taken = f"had port {port} before, and clients reconnect to it"
    with socket.create_server((host, int(port))), pytest.raises(OSError, match=taken):
        Controller(config).start()
    with Controller(config) as again:
        assert again.address == f"{host}:{port}"
