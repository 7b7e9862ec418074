"""The sync channel against real endpoints: retries, deadlines, giving up, forks, closing."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq

from dataplane.client.rpc import handshake, pending_calls
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.controller.controller import Controller
from dataplane.core import failpoints
from dataplane.errors import (
    AuthenticationError,
    CallTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    PartitionNotFoundError,
    ProtocolVersionError,
    RequestTooLargeError,
    ServiceRestartedError,
    ServiceUnavailableError,
    SessionExpiredError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.ledger.ledger import Ledger
from dataplane.protocol import zmq_frames
from tests.children import Child
from tests.controller.service import (  # noqa: F401
    NEVER_S,
    QUICK,
    STILL,
    Open,
    ScriptedLedger,
    ledger,
    open_channel,
    scripted,
    unhurried,
)
from tests.ports import free_ports

pytestmark = pytest.mark.integration

WAIT_S = 60.0
CLAIM = c.Claim(partition="p", task="t", fields=(), batch_size=1, timeout_s=60.0)


@pytest.fixture
def real() -> Iterator[Controller]:
    with Controller(QUICK, epoch=1) as controller:
        yield controller


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are repeated after a tenth of a second."""
    monkeypatch.setattr(pending_calls, "RESEND_S", 0.1)


def register(channel: ControllerChannel) -> None:
    channel.call(c.Register(partition="p", fields={}, num_samples=None, tasks=("t",)))


def test_commands_reach_the_ledger_and_their_errors_come_back(real: Controller, open_channel: Open) -> None:
    channel = open_channel(real, client_name="me")
    register(channel)
    call_id, described = channel.call(c.Describe(partition="p"))
    assert call_id == 2
    assert isinstance(described, c.Described)
    assert described.tasks == ("t",)
    with pytest.raises(PartitionNotFoundError, match="'other'"):
        channel.call(c.Describe(partition="other"))
    _, stats = channel.call(c.Stats())
    assert isinstance(stats, c.StatsReport)
    assert [session.name for session in stats.sessions] == ["me"]
    assert (channel.session, channel.address, channel.units) == (1, real.address, ())
    assert channel.epoch == stats.epoch


def test_commands_on_the_same_host_go_through_ipc(
    real: Controller, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "IPC_WAIT_S", WAIT_S)
    assert open_channel(real).endpoint.startswith("ipc://")


def test_another_host_or_an_ipc_that_does_not_answer_is_served_over_tcp(
    real: Controller, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = handshake.dealer_socket
    nobody = {"ipc": "ipc://@tq-nobody-listens-here"}
    monkeypatch.setattr(handshake, "IPC_WAIT_S", 0.05)
    monkeypatch.setattr(
        handshake, "dealer_socket", lambda ctx, end, token: connect(ctx, nobody.get(end[:3], end), token)
    )
    channel = open_channel(real)
    assert channel.endpoint == f"tcp://{real.address}"
    register(channel)
    monkeypatch.setattr(handshake, "boot_id", lambda: "another host")
    other = open_channel(real)
    assert other.endpoint.startswith("tcp://127.0.0.1:")
    other.call(c.Describe(partition="p"))


def test_many_threads_call_at_once(real: Controller, open_channel: Open) -> None:
    channel = open_channel(real)
    register(channel)
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: channel.call(c.Describe(partition="p")), range(200)))
    assert len({call_id for call_id, _ in outcomes}) == 200
    _, stats = channel.call(c.Stats())
    assert isinstance(stats, c.StatsReport)


def test_a_lost_answer_is_asked_for_again_under_the_same_id(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, soon: None
) -> None:
    ledger.answer = lambda call: c.Done() if len(ledger.of(c.Seal)) >= 3 else None
    call_id, _ = open_channel(scripted).call(c.Seal(partition="p"))
    assert {call.call_id for call in ledger.of(c.Seal)} == {call_id}


def test_posted_commands_are_repeated_until_answered(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, soon: None
) -> None:
    ledger.answer = lambda call: (
        c.UnitList(units=())
        if isinstance(call.command, c.Units)
        else c.Done()
        if len(ledger.of(c.Release)) >= 2
        else None
    )
    channel = open_channel(scripted)
    channel.post(c.Release(located=7))
    assert {call.call_id for call in ledger.wait_for(c.Release, 2)} == {1}
    while True:
        channel.call(c.Units())
        if ledger.of(c.Units)[-1].watermark > 1:
            break


def test_no_answer_within_the_deadline_is_an_error_that_names_the_service(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open
) -> None:
    ledger.answer = lambda call: None if isinstance(call.command, c.Seal) else c.Done()
    with pytest.raises(CallTimeoutError, match=f"Seal: no response from the controller at {scripted.address} within"):
        open_channel(scripted).call(c.Seal(partition="p"), timeout_s=0.05)


@pytest.mark.parametrize(
    ("command", "undo"),
    [
        (c.Allocate(partition="p", columns=(), timeout_s=0.01), c.Abort),
        (c.Locate(partition="p", samples=c.Samples(ids=("a",)), fields=("f",)), c.Release),
        (c.Claim(partition="p", task="t", fields=(), batch_size=1, timeout_s=0.01), c.Unclaim),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, c.Command) else each.__name__,
)
def test_a_call_given_up_is_undone(
    command: c.Command,
    undo: type[c.Command],
    scripted: Controller,
    ledger: ScriptedLedger,
    open_channel: Open,
    unhurried: None,
) -> None:
    ledger.answer = lambda call: None if isinstance(call.command, type(command)) else c.Done()
    channel = open_channel(scripted, heartbeat_s=NEVER_S)
    with pytest.raises(CallTimeoutError):
        channel.call(command, timeout_s=0.05)
    (undone,) = ledger.wait_for(undo)
    assert undone.call_id == 2
    assert undone.watermark == 1
    (names_the_call,) = undone.command.__struct_fields__
    assert getattr(undone.command, names_the_call) == 1


def claimed() -> c.Result:
    empty = np.array([], np.int64)
    return c.Claimed(ids=(), rows=empty, generations=empty, fields=(), tags=())


def test_failpoints_stand_around_every_command(
    scripted: Controller, open_channel: Open, ledger: ScriptedLedger
) -> None:
    reached: list[str] = []
    for name in ("call.Seal.before", "call.Seal.after", "call.Release.before", "call.Release.after"):
        failpoints.arm(name, lambda name=name: reached.append(name))  # type: ignore[misc]
    channel = open_channel(scripted)
    channel.call(c.Seal(partition="p"))
    channel.post(c.Release(located=1))
    assert reached == ["call.Seal.before", "call.Seal.after", "call.Release.before", "call.Release.after"]


def test_a_call_that_waits_stops_no_others(open_channel: Open) -> None:
    ledger = Ledger(1, limits=Limits(in_flight=16))
    with Controller(QUICK, ledger=ledger, epoch=1) as controller, ThreadPoolExecutor(1) as pool:
        channel = open_channel(controller)
        register(channel)
        waiting = pool.submit(channel.call, CLAIM)
        for _ in range(100):
            channel.call(c.Units())
        assert len(ledger._state.sessions[channel.session].answers) <= 2
        tag = c.TagColumn(name="x", values=(1,))
        new = c.Samples(ids=("a",))
        channel.call(c.Commit(partition="p", samples=new, mode=c.Mode.CREATE, tags=(tag,)))
        _, claimed_now = waiting.result(WAIT_S)
        assert isinstance(claimed_now, c.Claimed)
        assert claimed_now.ids == ("a",)
        channel.close()


def test_a_message_beyond_the_limit_is_refused_at_both_ends(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A heartbeat that is late would have the session looked for, and what answers that is longer than 100 bytes.
    channel = open_channel(scripted, heartbeat_s=NEVER_S)
    monkeypatch.setattr(zmq_frames, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(RequestTooLargeError, match="a Seal command needs"):
        channel.call(c.Seal(partition="x" * 200))
    ledger.answer = lambda call: c.Done() if isinstance(call.command, c.Bye) else long_blocked()
    with pytest.raises(RequestTooLargeError, match="the answer needs"):
        channel.call(c.WhyBlocked(partition="p", task="t"))


def long_blocked() -> c.Result:
    counts = dict.fromkeys(("unclaimed", "ready", "matching", "claimed", "leased", "held", "dropped", "born"), 0)
    groups: dict[str, Any] = {"groups": None, "partial_groups": None, "partial": {}, "expected": None}
    return c.Blocked(
        lacking={},
        undeclared=(),
        unproduced=(),
        filtered={},
        complete=False,
        version=0,
        writers=(),
        why="y" * 200,
        **counts,
        **groups,
    )


def test_values_that_do_not_fit_a_message_use_up_no_call_id(
    scripted: Controller, open_channel: Open, ledger: ScriptedLedger
) -> None:
    channel = open_channel(scripted)
    with pytest.raises(InvalidRequestError, match="Seal"):
        channel.call(c.Seal(partition="\ud800"))
    channel.call(c.Seal(partition="p"))
    assert ledger.of(c.Seal)[-1].watermark == 2


# --- sessions


def test_a_dead_address_is_an_error_at_once(open_channel: Open) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(ServiceUnavailableError, match=f":{port}: cannot connect to it"):
            ControllerChannel.open(replace(QUICK, address=f"127.0.0.1:{port}"))


def test_something_else_at_the_address_is_an_error_in_time() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ServiceUnavailableError, match="does not answer in time"):
            ControllerChannel.open(replace(QUICK, address=address, connect_timeout_s=0.2))


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="no address of a data plane service"):
        ControllerChannel.open(QUICK)


def test_the_token_is_checked() -> None:
    with Controller(replace(QUICK, token="secret")) as controller:
        for token in (None, "wrong"):
            with pytest.raises(AuthenticationError):
                ControllerChannel.open(replace(QUICK, address=controller.address, token=token))
        channel = ControllerChannel.open(replace(QUICK, address=controller.address, token="secret"))
        channel.call(c.Units())
        channel.close()


def test_another_protocol_version_is_named(real: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 99)
    with pytest.raises(ProtocolVersionError, match="version 99"):
        ControllerChannel.open(replace(QUICK, address=real.address))


def test_an_expired_session_ends_the_channel(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, unhurried: None
) -> None:
    ledger.answer = lambda call: SessionExpiredError(session=1, why="it is not there")
    ledger.ended = SessionExpiredError(session=1, why="it was silent")
    channel = open_channel(scripted, heartbeat_s=NEVER_S)
    for command in (c.Units(), c.Stats()):
        with pytest.raises(SessionExpiredError, match="it was silent"):
            channel.call(command)
    assert len(ledger.of(c.Call)) == 1
    assert list(dict.fromkeys(item.session for item in ledger.of(c.OpenSession))) == [0, 1]


def test_a_service_that_has_the_session_but_not_for_calls_ends_the_channel(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, unhurried: None
) -> None:
    ledger.answer = lambda call: SessionExpiredError(session=1, why="it is not there")
    channel = open_channel(scripted, heartbeat_s=NEVER_S)
    for command in (c.Units(), c.Stats()):
        with pytest.raises(SessionExpiredError, match="it is not there"):
            channel.call(command)
    assert len(ledger.of(c.Call)) == 2


def test_a_service_of_another_epoch_ends_the_channel(open_channel: Open) -> None:
    port = free_ports(2)  # which nobody is given while no service has it
    with Controller(replace(QUICK, port=port), epoch=1) as first:
        channel = open_channel(first)
    with (
        Controller(replace(QUICK, port=port), epoch=2),
        pytest.raises(ServiceRestartedError, match="epoch 2, expected epoch 1"),
    ):
        keep_asking(channel)


def keep_asking(channel: ControllerChannel) -> None:
    """Until the channel has found out what there is to find out."""
    while True:
        with contextlib.suppress(CallTimeoutError, ServiceUnavailableError):
            channel.call(c.Units(), timeout_s=0.1)


def test_a_service_that_went_away_is_noticed_while_a_call_waits(open_channel: Open, soon: None) -> None:
    ledger = ScriptedLedger(lambda call: None)
    controller = Controller(STILL, ledger=ledger, epoch=1).start()
    channel = open_channel(controller, heartbeat_s=NEVER_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.call, CLAIM)
        ledger.wait_for(c.Claim)
        controller.stop()
        with pytest.raises(ServiceUnavailableError, match="the service is stopping"):
            waiting.result(WAIT_S)
    channel._heartbeat.check()
    with pytest.raises(ServiceUnavailableError, match=controller.address):
        channel.call(c.Units())


def test_the_end_of_a_client_process_is_told_at_once(scripted: Controller, ledger: ScriptedLedger) -> None:
    script = (
        "import sys; from dataplane.config import DataPlaneConfig\n"
        "from dataplane.client.rpc import channel, handshake\n"
        "handshake.IPC_WAIT_S = 60.0\n"
        "open_one = channel.ControllerChannel.open(DataPlaneConfig(address=sys.argv[1], heartbeat_s=600.0))\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    with Child([sys.executable, "-c", script, scripted.address]) as child:
        assert child.line() == "open"
        assert ledger.of(c.SessionSilent) == []
        child.kill()
        (silent,) = ledger.wait_for(c.SessionSilent)
    assert silent.session == 1


# --- forks


def in_fork(check: Callable[[], None]) -> int:
    """The exit status of a child that runs `check` and leaves as a plain program would not: at once."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own_session_and_the_parents_lives_on(real: Controller, open_channel: Open) -> None:
    channel = open_channel(real)
    register(channel)

    def child() -> None:
        for attempt in (lambda: channel.call(c.Units()), lambda: channel.post(c.Release(located=1))):
            with pytest.raises(ClientClosedError, match="created before fork"):
                attempt()
        channel.close()
        own = ControllerChannel.open(replace(QUICK, address=real.address))
        assert own.session != 1
        own.call(c.Describe(partition="p"))
        own.close()

    for _ in range(3):
        assert in_fork(child) == 0
        channel.call(c.Describe(partition="p"))
    _, stats = channel.call(c.Stats())
    assert isinstance(stats, c.StatsReport)
    assert 1 in [session.session for session in stats.sessions if session.state == "live"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_only_a_grpc_gateway_cannot_be_started_in_a_child_of_a_service(real: Controller) -> None:
    def child() -> None:
        with pytest.raises(InvalidRequestError, match="Start the service in a new process"):
            Controller(replace(QUICK, grpc_port=0)).start()
        with Controller(QUICK) as own:
            channel = ControllerChannel.open(replace(QUICK, address=own.address))
            channel.call(c.Units())
            channel.close()

    assert in_fork(child) == 0


# --- the end


def test_closing_says_bye_and_refuses_calls(scripted: Controller, ledger: ScriptedLedger, unhurried: None) -> None:
    channel = ControllerChannel.open(replace(STILL, address=scripted.address))
    channel.close()
    channel.close()
    assert len(ledger.of(c.Bye)) == 1
    for attempt in (lambda: channel.call(c.Units()), lambda: channel.post(c.Release(located=1))):
        with pytest.raises(ClientClosedError):
            attempt()


def test_closing_wakes_calls_of_other_threads(scripted: Controller, ledger: ScriptedLedger, unhurried: None) -> None:
    ledger.answer = lambda call: None if isinstance(call.command, c.Claim) else c.Done()
    channel = ControllerChannel.open(replace(STILL, address=scripted.address))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(channel.call, CLAIM) for _ in range(2)]
        ledger.wait_for(c.Claim, 2)
        channel.close()
        for call in waiting:
            with pytest.raises(ClientClosedError, match=r"close\(\) was called"):
                call.result(WAIT_S)
    assert len(ledger.of(c.Bye)) == 1


def test_closing_after_the_service_has_gone_is_quiet(soon: None) -> None:
    controller = Controller(QUICK).start()
    channel = ControllerChannel.open(replace(QUICK, address=controller.address))
    controller.stop()
    with pytest.raises(ServiceUnavailableError):
        channel.call(c.Units())
    channel.close()


def test_the_server_refuses_what_is_no_request(real: Controller) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = handshake.dealer_socket(context, f"tcp://{real.address}")
    try:
        for frames, why in (
            ([b"Units"], "malformed request"),
            ([b"", *[b"\xc0"] * 33], "at most 32 requests"),
            ([messages.encode(c.Tick(now=1.0))], "Invalid value 'Tick'"),
            ([messages.encode(c.UnitLost(unit=1))], "Invalid value 'UnitLost'"),
            ([b"\xff\xff"], "malformed request"),
        ):
            dealer.send_multipart(frames)
            assert dealer.poll(int(WAIT_S * 1000))
            (reply,) = zmq_frames.Reply.parse(dealer.recv_multipart())
            assert reply.call_id == 0
            with pytest.raises(InvalidRequestError, match=why):
                reply.good_body()
    finally:
        context.destroy(linger=0)
