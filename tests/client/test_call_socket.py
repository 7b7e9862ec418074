"""The socket that the threads of a client share: messages with the requests of several threads, and the thread that
polls for all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from dataplane.client.rpc import call_socket, heartbeat
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.controller.controller import Controller
from dataplane.errors import CallTimeoutError, ClientClosedError, InternalError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages as messages_of
from dataplane.protocol import zmq_frames
from tests.controller.service import (  # noqa: F401
    NEVER_S,
    Open,
    ScriptedLedger,
    done,
    open_channel,
    scripted,
    unhurried,
)
from tests.open_files import exhausted
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

WAIT_S = 60.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests in each message that is sent from now on."""
    numbers: list[int] = []
    send = call_socket.send

    def counted(dealer: Any, frames: list[bytes]) -> None:
        numbers.append(len(zmq_frames.split_requests(frames)))
        send(dealer, frames)

    monkeypatch.setattr(call_socket, "send", counted)
    return numbers


class LateLedger(ScriptedLedger):
    """Does not answer Seal commands while `late` is set. Release(located=n) answers call n, too."""

    late = False

    def __init__(self) -> None:
        super().__init__(lambda call: None if self.late and isinstance(call.command, c.Seal) else done(call))

    def apply(self, item: c.Input) -> list[c.Output]:
        outputs = super().apply(item)
        if isinstance(item, c.Call) and isinstance(item.command, c.Release):
            outputs.append(c.Answer(session=item.session, call_id=item.command.located, result=c.Done()))
        return outputs


@pytest.fixture
def ledger() -> LateLedger:
    return LateLedger()


@pytest.fixture
def channel(scripted: Controller, open_channel: Open, unhurried: None) -> ControllerChannel:
    """A channel that sends no heartbeats, and resends nothing on its own."""
    return open_channel(scripted, heartbeat_s=NEVER_S)


def seal(channel: ControllerChannel, name: str) -> c.Result:
    return channel.call(c.Seal(partition=name))[1]


def sealing(channel: ControllerChannel, threads: ThreadPoolExecutor, number: int) -> dict[int, Future[c.Result]]:
    """As many calls of threads which wait for their replies, by id."""
    calls: dict[int, Future[c.Result]] = {}
    for _ in range(number):
        call = threads.submit(seal, channel, "p")
        wait_until(lambda: len(channel._socket.waiting) == len(calls) + 1, "one more thread waits")
        calls[(channel._socket.waiting.keys() - calls.keys()).pop()] = call
    return calls


def poller(channel: ControllerChannel) -> Any:
    """The call whose thread polls for all, once there is one."""
    wait_until(lambda: channel._poller and channel._poller.waker is not None, "a thread polls")
    return channel._poller


def test_requests_of_threads_that_send_at_one_moment_share_messages(
    channel: ControllerChannel, messages: list[int], threads: ThreadPoolExecutor
) -> None:
    seal(channel, "p")
    assert messages == [1]
    with channel._use:  # as if another thread sent right now
        calls = [threads.submit(seal, channel, f"p{number}") for number in range(40)]
        wait_until(lambda: len(channel._socket.outbox) == 40, "all requests are there")
    for call in calls:
        call.result(WAIT_S)
    assert messages == [1, 32, 8]
    assert not channel._socket.waiting


def test_another_thread_polls_when_the_reply_of_the_first_has_arrived(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor
) -> None:
    ledger.late = True
    calls = sealing(channel, threads, 8)
    while calls:
        call_id = poller(channel).outgoing.call_id
        channel.post(c.Release(located=call_id))
        calls.pop(call_id).result(WAIT_S)
        assert not any(call.done() for call in calls.values())


def test_a_third_thread_polls_if_the_one_that_is_woken_to_poll_has_its_reply_already(
    channel: ControllerChannel,
    ledger: LateLedger,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that sends receives replies of others."""
    ledger.late = True
    calls = sealing(channel, threads, 3)
    first = poller(channel)
    woken: list[int] = []
    wake = type(first).wake

    def answered_and_woken(waiting: Any) -> None:
        if waiting is not first and not woken:
            woken.append(waiting.outgoing.call_id)
            body = msgspec.Raw(messages_of.encode(c.Done()))
            waiting.outcome = zmq_frames.Reply(waiting.outgoing.call_id, zmq_frames.OK, body)
        wake(waiting)

    monkeypatch.setattr(type(first), "wake", answered_and_woken)
    channel.post(c.Release(located=first.outgoing.call_id))
    calls.pop(first.outgoing.call_id).result(WAIT_S)
    calls.pop(woken[0]).result(WAIT_S)
    [(last, call)] = calls.items()
    assert poller(channel).outgoing.call_id == last
    channel.post(c.Release(located=last))
    call.result(WAIT_S)


def test_a_call_that_another_thread_ends_wakes_the_thread_that_polls(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor
) -> None:
    ledger.late = True
    [call] = sealing(channel, threads, 1).values()
    poller(channel).end(InternalError(what="ended"))
    assert isinstance(call.exception(WAIT_S), InternalError)


def test_after_an_error_while_sending_all_calls_are_resent_on_a_new_socket(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may have sent half a message."""
    monkeypatch.setattr(channel, "_use", threading.RLock())
    ledger.late = True
    calls = sealing(channel, threads, 2).values()
    wait_until(lambda: len(ledger.of(c.Seal)) == 2, "both are sent")
    dealer, send = channel._socket._dealer, call_socket.send
    assert dealer is not None

    def failing(dealer: zmq.Socket[bytes], frames: list[bytes]) -> None:
        dealer.send(frames[0], zmq.SNDMORE)
        raise BrokenPipeError

    ledger.late = False
    with channel._use:  # no other thread sends the request before this one
        monkeypatch.setattr(call_socket, "send", failing)
        with pytest.raises(BrokenPipeError):
            channel._send_once(channel._calls.begin_post(c.Release(located=1)))
        monkeypatch.setattr(call_socket, "send", send)
    for call in calls:
        call.result(WAIT_S)
    assert dealer.closed
    seal(channel, "r")


def test_a_malformed_reply_fails_all_calls_with_an_exception_for_each(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.late = True
    calls = sealing(channel, threads, 2).values()
    decode = zmq_frames.decode_reply
    malformed = [b"?"]

    def decoded(frame: bytes) -> zmq_frames.Reply:
        return decode(malformed.pop() if malformed else frame)

    monkeypatch.setattr(zmq_frames, "decode_reply", decoded)
    channel.post(c.Release(located=1))
    errors = [call.exception(WAIT_S) for call in calls]
    assert all(isinstance(error, InternalError) and "malformed" in str(error) for error in errors)
    assert errors[0] is not errors[1]
    ledger.late = False
    seal(channel, "p")


def test_closing_ends_all_waiting_threads(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor
) -> None:
    ledger.late = True
    calls = sealing(channel, threads, 16).values()
    channel.close()
    assert all(isinstance(call.exception(WAIT_S), ClientClosedError) for call in calls)


def test_a_call_without_a_reply_leaves_the_socket_usable(
    scripted: Controller,
    ledger: LateLedger,
    open_channel: Open,
    unhurried: None,
) -> None:
    channel = open_channel(scripted, call_timeout_s=0.2, heartbeat_s=NEVER_S)
    ledger.late = True
    with pytest.raises(CallTimeoutError):
        seal(channel, "p")
    ledger.late = False
    channel.call(c.Seal(partition="p"), timeout_s=WAIT_S)


def test_too_few_open_files_are_a_named_error_and_lose_no_post(
    scripted: Controller,
    open_channel: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = open_channel(scripted)
    with exhausted(monkeypatch, call_socket, "dealer_socket", zmq.ZMQError):
        with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
            seal(channel, "p")
        channel.post(c.Release(located=1))
        assert channel._calls._call_ids.unanswered == 1
        assert not channel._socket.waiting
    seal(channel, "p")
    for outgoing in channel._calls.due(all_of_them=True):
        channel._send_once(outgoing)
    wait_until(lambda: channel._maintain() or channel._calls._call_ids.unanswered == 0, "the release is answered")


def test_too_few_open_files_when_the_session_moved_or_to_say_goodbye(
    channel: ControllerChannel, ledger: LateLedger, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.late = True
    calls = sealing(channel, threads, 2).values()
    with exhausted(monkeypatch, call_socket, "dealer_socket", zmq.ZMQError):
        channel._reconnect()
        assert all(isinstance(call.exception(WAIT_S), ServiceUnavailableError) for call in calls)
    ledger.late = False
    seal(channel, "p")
    with exhausted(monkeypatch, call_socket, "dealer_socket"):
        channel.close()


def test_too_few_open_files_to_look_for_the_service(
    scripted: Controller, open_channel: Open, monkeypatch: pytest.MonkeyPatch, ledger: LateLedger
) -> None:
    """It is looked for again; calls go on, as they have their sockets."""
    channel = open_channel(scripted)
    asked = threading.Event()
    real = heartbeat.resume_session
    left = [2]

    def none_left_at_first(*arguments: Any) -> Any:
        asked.set()
        if left[0]:
            left[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return real(*arguments)

    monkeypatch.setattr(heartbeat, "resume_session", none_left_at_first)
    channel._heartbeat.check()
    assert asked.wait(60)
    channel.call(c.Seal(partition="p"))
    channel._heartbeat.check()
    wait_until(lambda: not left[0], "it was looked for again")
    channel.call(c.Seal(partition="p"))
