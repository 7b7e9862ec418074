"""The ledger's thread: what goes in, to whom outputs go, and what happens when the ledger fails."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from dataplane.controller.event_loop import LedgerThread
from dataplane.controller.requests import Facts, Reply
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core import limited_log
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import DataPlaneError, InternalError, ServiceUnavailableError, StateDirError
from dataplane.ledger import commands as c
from tests.controller.service import ScriptedLedger
from tests.logs import logged

pytestmark = pytest.mark.integration

Serve = Callable[..., LedgerThread]
FACTS = Facts(address="here:1", epoch=1, host="host", endpoints=(), heartbeat_s=1.0)
WAIT_S = 60.0


@pytest.fixture
def serve() -> Iterator[Serve]:
    shells = []

    def start(ledger: ScriptedLedger, **settings: Any) -> LedgerThread:
        server = ZmqServer("127.0.0.1", 0)
        server.introduce(FACTS)
        shells.append(LedgerThread(ledger, server, FACTS, **settings))
        shells[-1].start()
        return shells[-1]

    yield start
    for shell in shells:
        shell.stop(WAIT_S)


def call(call_id: int, command: c.Command | None = None) -> c.Call:
    return c.Call(session=1, call_id=call_id, watermark=1, command=command or c.Units())


class Inbox:
    """Collects what replies bring."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[c.Output] = queue.SimpleQueue()

    def take(self) -> c.Output:
        return self.outputs.get(timeout=WAIT_S)

    @property
    def reply(self) -> Reply:
        return self.outputs.put


def result(output: c.Output) -> c.Result | DataPlaneError:
    assert isinstance(output, c.Answer)
    return output.result


def test_inputs_are_applied_in_order_after_a_tick(serve: Serve) -> None:
    ledger, inbox = ScriptedLedger(), Inbox()
    shell = serve(ledger)
    for call_id in range(1, 50):
        shell.submit(call(call_id), inbox.reply)
    answers = [inbox.take() for _ in range(1, 50)]
    assert [answer.call_id for answer in answers if isinstance(answer, c.Answer)] == list(range(1, 50))
    assert [item.call_id for item in ledger.of(c.Call)] == list(range(1, 50))
    assert ledger.ticks >= 1


def test_a_deadline_of_the_ledger_wakes_the_thread(serve: Serve) -> None:
    inbox, ledger = Inbox(), ScriptedLedger()

    def park(item: c.Call) -> None:
        ledger.deadline = time.monotonic() + 0.05

    ledger.answer = park
    serve(ledger).submit(call(1), inbox.reply)
    ledger.wait_until(lambda: ledger.ticks >= 2 and ledger.deadline is None)


def ledger_wakes(shell: LedgerThread) -> None:
    """Returns once the ledger's thread has been around."""
    inbox = Inbox()
    shell.submit(c.OpenSession(nonce="x", host="h", name="n", protocol_version=PROTOCOL_VERSION), inbox.reply)
    inbox.take()


def test_a_failing_ledger_is_logged_and_answered_and_goes_on(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(item: c.Call) -> c.Result:
        if item.call_id == 1:
            raise ZeroDivisionError("inside")
        return c.Done()

    inbox, shell = Inbox(), serve(ScriptedLedger(fail))
    with caplog.at_level(logging.ERROR):
        shell.submit(call(1, c.Seal(partition="bad one")), inbox.reply)
        error = result(inbox.take())
    assert isinstance(error, InternalError)
    assert "Seal: ZeroDivisionError" in str(error)
    assert "bad one" in caplog.text
    shell.submit(call(2), inbox.reply)
    assert isinstance(result(inbox.take()), c.Done)


def test_what_the_journal_cannot_take_is_refused_and_the_service_goes_on(serve: Serve) -> None:
    def full(item: c.Call) -> c.Result:
        if item.call_id == 1:
            raise StateDirError(directory="here", why="no space left")
        return c.Done()

    inbox, shell = Inbox(), serve(ScriptedLedger(full))
    shell.submit(call(1), inbox.reply)
    assert isinstance(result(inbox.take()), StateDirError)
    shell.submit(call(2), inbox.reply)
    assert isinstance(result(inbox.take()), c.Done)


def test_a_reply_that_fails_stops_nothing(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: c.Output) -> None:
        raise RuntimeError("gone")

    inbox, shell = Inbox(), serve(ScriptedLedger())
    shell.submit(call(1), broken)
    shell.submit(call(2), inbox.reply)
    assert isinstance(result(inbox.take()), c.Done)
    assert "Could not deliver" in caplog.text


def test_stopping_answers_parked_calls_and_refuses_new_ones(serve: Serve) -> None:
    inbox, ledger = Inbox(), ScriptedLedger(lambda item: None)
    shell = serve(ledger)
    shell.submit(call(1), inbox.reply)
    ledger.wait_for(c.Call)
    shell.stop(WAIT_S)
    assert isinstance(result(inbox.take()), ServiceUnavailableError)
    with pytest.raises(ServiceUnavailableError, match="is stopping"):
        shell.submit(call(2))
    shell.stop(WAIT_S)


def test_a_withdrawn_reply_is_not_called(serve: Serve) -> None:
    gone, stays, ledger = Inbox(), Inbox(), ScriptedLedger(lambda item: None)
    shell = serve(ledger)
    replies: list[Reply] = [gone.outputs.put, stays.outputs.put]
    for reply in replies:
        shell.submit(call(1), reply)
    ledger.wait_for(c.Call, 2)
    shell.withdraw(call(1), replies[0])
    ledger.answer = lambda item: c.Done()
    shell.submit(call(1))
    assert isinstance(result(stays.take()), c.Done)
    assert gone.outputs.empty()


def test_a_repeated_call_is_answered_once_to_each_caller(serve: Serve) -> None:
    """It waits, and is answered at its last repetition, together with another output."""
    first, second, ledger = Inbox(), Inbox(), ScriptedLedger(lambda item: None)
    shell = serve(ledger)
    replies: list[Reply] = [first.reply, second.reply]
    for reply in (*replies, replies[0]):
        shell.submit(call(1), reply)
    ledger.wait_for(c.Call, 3)
    apply = ledger.apply
    ledger.answer = lambda item: c.Done()
    ledger.apply = lambda item: [  # type: ignore[method-assign]
        *([c.Notice(text="before it")] if isinstance(item, c.Call) else []),
        *apply(item),
    ]
    shell.submit(call(1), replies[1])
    for inbox in (first, second):
        assert isinstance(result(inbox.take()), c.Done)
    ledger_wakes(shell)
    assert first.outputs.empty()
    assert second.outputs.empty()
    assert not shell._pending


def test_nothing_is_recorded_of_a_call_that_is_answered_at_once(serve: Serve) -> None:
    inbox, ledger = Inbox(), ScriptedLedger()
    shell = serve(ledger)
    seen = []

    def answer(item: c.Call) -> c.Result:
        seen.append(dict(shell._pending))
        return c.Done()

    def reply(output: c.Output) -> None:
        seen.append(dict(shell._pending))
        inbox.outputs.put(output)

    ledger.answer = answer
    shell.submit(call(1), reply)
    assert isinstance(result(inbox.take()), c.Done)
    assert seen == [{}, {}]


def test_a_journal_that_cannot_be_written_refuses_and_goes_on(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_log, "EVERY_S", 600.0)

    def full(item: c.Call) -> c.Result:
        if item.call_id < 3:
            raise StateDirError(directory="/state", why="no space left on device")
        return c.Done()

    inbox, ledger = Inbox(), ScriptedLedger(full)
    shell = serve(ledger)
    with caplog.at_level(logging.ERROR):
        for call_id in (1, 2):
            shell.submit(call(call_id), inbox.reply)
            error = result(inbox.take())
            assert isinstance(error, StateDirError)
            assert error.directory == "/state"
    assert caplog.text.count("requests are rejected") == 1  # said now and then, not for each
    shell.submit(call(3), inbox.reply)
    assert isinstance(result(inbox.take()), c.Done)


@pytest.mark.parametrize("where", ["handle", "_forget"])
def test_a_fault_in_what_was_submitted_is_logged_and_the_thread_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    shell = serve(ScriptedLedger())
    with monkeypatch.context() as patched:
        patched.setattr(shell, where, fail)
        with logged("Service failed to handle a submitted input and continues"):
            shell.submit(call(1))
            shell.withdraw(call(1), fail)
    ledger_wakes(shell)


def test_a_fault_in_the_server_is_logged_and_the_thread_goes_on(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = serve(ScriptedLedger())
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer, monkeypatch.context() as patched:
        peer.linger = 0
        # It fails on the first message, before it has looked at it.
        serve_one = ZmqServer.serve
        patched.setattr(ZmqServer, "serve", lambda server, handler: serve_one(server, handler) and fail())
        peer.connect(shell._zmq.endpoints[0])
        # The message is read on its own, or with what there is to know of its connection.
        with logged("and continues"):
            peer.send_multipart([b"Seal", b"", b""])
    ledger_wakes(shell)


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a defect")
