"""The calls of a session while its service comes and goes: what is waited for, what counts as an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dataplane.client.rpc.handshake import OpenedSession
from dataplane.client.rpc.pending_calls import Calls
from dataplane.config import DataPlaneConfig
from dataplane.errors import (
    ClientClosedError,
    DataPlaneError,
    ServiceUnavailableError,
    SessionExpiredError,
    StateDirError,
    to_wire,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames

SESSION = OpenedSession(
    number=7, epoch=1, units=(), address="here:1", endpoint="ipc://@x", heartbeat_s=1.0, nonce="n", durable=True
)
STOPPING = ServiceUnavailableError(address="here:1", why="the service is stopping")
EXPIRED = SessionExpiredError(session=7, why="gone")
FULL = StateDirError(directory="/state", why="disk full")


def calls_of(**settings: Any) -> tuple[Calls, list[int]]:
    """The calls, and a list that grows with each doubt."""
    durable = settings.pop("durable", True)
    calls = Calls(replace(SESSION, durable=durable), DataPlaneConfig(**settings))
    doubts: list[int] = []
    calls.on_doubt = lambda: doubts.append(1)
    return calls, doubts


def refusal(number: int, error: DataPlaneError) -> zmq_frames.Reply:
    return zmq_frames.Reply(number, *to_wire(error))


def done(number: int) -> zmq_frames.Reply:
    return zmq_frames.Reply(number, "ok", codec.encode_result(c.Done()))


def test_a_lost_service_is_waited_for_only_if_it_keeps_its_state() -> None:
    durable, plain = calls_of()[0], calls_of(durable=False)[0]
    for calls in (durable, plain):
        calls.record_loss("no route")
    durable.check()
    assert durable.waiting
    with pytest.raises(ServiceUnavailableError, match=r"at here:1: no route\.$"):
        plain.check()
    for calls in (durable, plain):
        assert calls.unreachable
        calls.check_open()
        calls.resume(replace(SESSION, address="there:2", epoch=2))
        calls.check()
        assert not calls.unreachable


def test_it_is_not_waited_for_beyond_the_window() -> None:
    calls, _ = calls_of(reconnect_s=0.0)
    calls.record_loss("no route")
    assert not calls.waiting
    with pytest.raises(ServiceUnavailableError, match="no route; it did not return within reconnect_s=0 s"):
        calls.check()
    calls.process_reply(done(0))
    calls.check()


def test_a_service_that_stops_answers_nothing_if_it_keeps_its_state() -> None:
    calls, doubts = calls_of()
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    assert not calls.ends_call(call, refusal(call.number, STOPPING))
    calls.process_reply(refusal(posted.number, STOPPING))
    assert len(doubts) == 2
    assert calls.waiting
    assert [again.number for again in calls.due(all_of_them=True)] == [posted.number]
    calls.process_reply(done(posted.number))
    assert calls.due(all_of_them=True) == []


def test_a_service_that_stops_for_good_says_so_to_its_calls() -> None:
    calls, doubts = calls_of(durable=False)
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    assert calls.ends_call(call, refusal(call.number, STOPPING))
    with pytest.raises(ServiceUnavailableError, match="stopping"):
        calls.settle(call, refusal(call.number, STOPPING))
    calls.process_reply(refusal(posted.number, STOPPING))
    assert calls.due(all_of_them=True) == []
    assert not doubts


def test_the_end_of_the_session_is_believed_when_it_was_looked_into() -> None:
    calls, doubts = calls_of()
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    calls.process_reply(refusal(posted.number, EXPIRED))
    assert not calls.ends_call(call, refusal(call.number, EXPIRED))
    assert len(doubts) == 2
    assert not calls.over
    assert calls.ends_call(call, refusal(call.number, EXPIRED))
    with pytest.raises(SessionExpiredError, match="gone"):
        calls.settle(call, refusal(call.number, EXPIRED))
    with pytest.raises(SessionExpiredError, match="gone"):
        calls.check_open()
    calls.end(ClientClosedError())
    with pytest.raises(ClientClosedError):
        calls.check()


def test_what_could_not_be_written_down_was_not_done_and_is_posted_again() -> None:
    calls, _ = calls_of()
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    calls.process_reply(refusal(posted.number, FULL))
    assert [again.number for again in calls.due(all_of_them=True)] == [posted.number]
    assert calls.ends_call(call, refusal(call.number, FULL))
    with pytest.raises(StateDirError, match="disk full"):
        calls.settle(call, refusal(call.number, FULL))
