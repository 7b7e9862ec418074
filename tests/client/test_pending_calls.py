"""Calls of a session without a socket: ids, the watermark, undoing; a service that comes and goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.client.rpc.call_ids import MOST_RANGES, CallIds, undo_of
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
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames

# --- The calls of a session while its service comes and goes: what is waited for, what counts as an
# answer.


SESSION = OpenedSession(
    session_id=7, epoch=1, units=(), address="here:1", endpoint="ipc://@x", heartbeat_s=1.0, nonce="n", durable=True
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


def refusal(call_id: int, error: DataPlaneError) -> zmq_frames.Reply:
    name, facts = to_wire(error)
    return zmq_frames.Reply(call_id, name, msgspec.Raw(facts))


def done(call_id: int) -> zmq_frames.Reply:
    return zmq_frames.Reply(call_id, "ok", msgspec.Raw(messages.encode(c.Done())))


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
    assert not calls.ends_call(call, refusal(call.call_id, STOPPING))
    calls.process_reply(refusal(posted.call_id, STOPPING))
    assert len(doubts) == 2
    assert calls.waiting
    assert [again.call_id for again in calls.due(all_of_them=True)] == [posted.call_id]
    calls.process_reply(done(posted.call_id))
    assert calls.due(all_of_them=True) == []


def test_a_service_that_stops_for_good_says_so_to_its_calls() -> None:
    calls, doubts = calls_of(durable=False)
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    assert calls.ends_call(call, refusal(call.call_id, STOPPING))
    with pytest.raises(ServiceUnavailableError, match="stopping"):
        calls.settle(call, refusal(call.call_id, STOPPING))
    calls.process_reply(refusal(posted.call_id, STOPPING))
    assert calls.due(all_of_them=True) == []
    assert not doubts


def test_the_end_of_the_session_is_believed_when_it_was_looked_into() -> None:
    calls, doubts = calls_of()
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    calls.process_reply(refusal(posted.call_id, EXPIRED))
    assert not calls.ends_call(call, refusal(call.call_id, EXPIRED))
    assert len(doubts) == 2
    assert not calls.over
    assert calls.ends_call(call, refusal(call.call_id, EXPIRED))
    with pytest.raises(SessionExpiredError, match="gone"):
        calls.settle(call, refusal(call.call_id, EXPIRED))
    with pytest.raises(SessionExpiredError, match="gone"):
        calls.check_open()
    calls.end(ClientClosedError())
    with pytest.raises(ClientClosedError):
        calls.check()


def test_what_could_not_be_written_down_was_not_done_and_is_posted_again() -> None:
    calls, _ = calls_of()
    call, posted = calls.begin(c.Units()), calls.begin_post(c.Release(located=1))
    calls.process_reply(refusal(posted.call_id, FULL))
    assert [again.call_id for again in calls.due(all_of_them=True)] == [posted.call_id]
    assert calls.ends_call(call, refusal(call.call_id, FULL))
    with pytest.raises(StateDirError, match="disk full"):
        calls.settle(call, refusal(call.call_id, FULL))


# --- Numbers, the watermark, and the undoing of calls that nobody waits for.


ALLOCATE = c.Allocate(partition="p", columns=())
LOCATE = c.Locate(partition="p", samples=c.Samples(ids=()), fields=())
CLAIM = c.Claim(partition="p", task="t", fields=(), batch_size=1)
COMMIT = c.Commit(
    partition="p",
    samples=c.Samples(rows=np.array([], np.int64), generations=np.array([], np.int64)),
    mode=c.Mode.UPDATE,
    reservation=7,
)


def test_answers_may_come_twice_and_for_ids_never_issued() -> None:
    call_ids = CallIds(1)
    call_ids.issue(c.Units(), now=0.0)
    for call_id in (1, 1, 99):
        call_ids.record_answer(call_id)
    assert call_ids.watermark == 2


@pytest.mark.parametrize(
    ("command", "undo"),
    [
        (ALLOCATE, c.Abort(reservation=1)),
        (LOCATE, c.Release(located=1)),
        (CLAIM, c.Unclaim(claimed=1)),
        (COMMIT, c.Abort(reservation=7)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_watermark_waits_for_the_undo_of_an_abandoned_call(command: c.Command, undo: c.Command) -> None:
    call_ids = CallIds(1)
    call_ids.issue(command, now=0.0)
    call = call_ids.abandon(1, now=1.0)
    assert call is not None
    assert type(call.command) is type(undo)
    assert repr(call.command) == repr(undo)
    assert (call.call_id, call.watermark) == (2, 1)
    call_ids.record_answer(1)  # the late answer of the abandoned call settles nothing
    assert call_ids.watermark == 1
    assert call_ids.issue(c.Stats(), now=1.0).watermark == 1
    call_ids.record_answer(2)
    assert call_ids.watermark == 3


def test_a_call_without_an_undo_is_below_the_watermark_once_abandoned() -> None:
    call_ids = CallIds(1)
    call_ids.issue(c.Clear(partition="p", samples=None), now=0.0)
    assert call_ids.abandon(1, now=0.0) is None
    assert call_ids.watermark == 2
    assert undo_of(1, c.Commit(partition="p", samples=c.Samples(ids=()), mode=c.Mode.UPSERT)) is None


BRIEF = (msgspec.structs.replace(LOCATE, brief=True), c.LocateRows(partition="p", plan=b"", ids=("a",)))


@pytest.mark.parametrize("command", BRIEF, ids=lambda each: type(each).__name__)
def test_no_answer_settles_a_brief_read(command: c.Command) -> None:
    """A repeated call is answered twice: the second answer may come while the rows are copied."""
    call_ids = CallIds(1)
    call_ids.issue(command, now=0.0)
    call_ids.repeat(1, now=1.0)
    for _ in range(2):
        call_ids.record_answer(1)
        assert call_ids.watermark == 1
    call_ids.settle(1)
    assert (call_ids.watermark, call_ids.ended_read) == (2, 1)
    call_ids.issue(c.Units(), now=2.0)
    assert call_ids.ended_read is None


@pytest.mark.parametrize("command", BRIEF, ids=lambda each: type(each).__name__)
def test_an_abandoned_brief_read_is_confirmed_soon(command: c.Command) -> None:
    calls, _ = calls_of()
    told: list[int | None] = []
    calls.on_ended_read = lambda: told.append(calls.ended_read)
    call = calls.begin(command)
    assert calls.abandon(call.call_id) is None
    assert told == [call.call_id]


def test_abandoning_twice_or_after_the_answer_undoes_nothing_more() -> None:
    call_ids = CallIds(1)
    call_ids.issue(CLAIM, now=0.0)
    assert call_ids.abandon(1, now=0.0) is not None
    assert call_ids.abandon(1, now=0.0) is None
    call_ids.issue(CLAIM, now=0.0)
    call_ids.record_answer(3)
    assert call_ids.abandon(3, now=0.0) is None


def test_posted_calls_come_due_until_they_are_answered() -> None:
    call_ids = CallIds(1)
    call_ids.issue(c.Release(located=1), now=0.0, posted=True)
    call_ids.issue(c.Stats(), now=0.0)
    assert call_ids.due(0.0) == []
    assert call_ids.due(0.5) == [1]
    call_ids.repeat(1, now=1.0)
    assert call_ids.due(0.5) == []
    assert call_ids.due(2.0) == [1]
    call_ids.record_answer(1)
    assert call_ids.due(2.0) == []


def test_what_is_answered_above_a_waiting_call_is_named_until_a_call_that_named_it_is_answered() -> None:
    call_ids = CallIds(1)
    call_ids.issue(CLAIM, now=0.0)
    for call_id in (2, 3):
        call = call_ids.issue(c.Units(), now=0.0)
        assert (call.call_id, call.watermark, call.confirmed) == (call_id, 1, (2, 2) if call_id == 3 else ())
        call_ids.record_answer(call_id)
    lost = call_ids.issue(c.Units(), now=0.0)
    later = call_ids.issue(c.Units(), now=0.0)
    assert lost.confirmed == later.confirmed == (3, 3)
    call_ids.record_answer(later.call_id)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (5, 5)
    assert call_ids.repeat(lost.call_id, now=1.0).confirmed == (5, 5)


def test_what_a_call_named_when_it_is_repeated_may_not_have_arrived_with_it() -> None:
    call_ids = CallIds(1)
    for _ in range(3):
        call_ids.issue(CLAIM, now=0.0)
    call_ids.record_answer(2)
    assert call_ids.repeat(3, now=1.0).confirmed == (2, 2)
    call_ids.record_answer(3)
    assert call_ids.issue(c.Units(), now=2.0).confirmed == (2, 3)


def test_an_answer_that_the_ledger_did_not_give_leaves_what_its_call_named() -> None:
    call_ids = CallIds(1)
    for _ in range(2):
        call_ids.issue(CLAIM, now=0.0)
    call_ids.record_answer(2)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (2, 2)
    call_ids.record_answer(3, processed=False)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (2, 3)


def test_what_the_watermark_passes_is_not_named() -> None:
    call_ids = CallIds(1)
    for _ in range(3):
        call_ids.issue(CLAIM, now=0.0)
    call_ids.record_answer(2)
    call_ids.record_answer(1)
    call = call_ids.issue(c.Units(), now=0.0)
    assert (call.watermark, call.confirmed) == (3, ())


def test_one_call_names_a_bounded_number() -> None:
    call_ids = CallIds(1)
    for _ in range(2 * MOST_RANGES + 9):
        call_ids.issue(CLAIM, now=0.0)
    for call_id in range(2, 2 * MOST_RANGES + 9, 2):
        call_ids.record_answer(call_id)
    first = call_ids.issue(c.Units(), now=0.0)
    assert first.confirmed[::2] == first.confirmed[1::2] == tuple(range(2, 2 * MOST_RANGES + 2, 2))
    call_ids.record_answer(first.call_id)
    rest = (*range(2 * MOST_RANGES + 2, 2 * MOST_RANGES + 9, 2), first.call_id)
    assert call_ids.issue(c.Units(), now=0.0).confirmed[::2] == rest


def test_what_is_known_of_a_range_is_not_named_again() -> None:
    call_ids = CallIds(1)
    for _ in range(9):
        call_ids.issue(CLAIM, now=0.0)
    for call_id in (2, 3, 4):
        call_ids.record_answer(call_id)
    early = call_ids.issue(c.Units(), now=0.0)
    assert early.confirmed == (2, 4)
    for call_id in (5, 6):
        call_ids.record_answer(call_id)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (2, 6)
    call_ids.record_answer(early.call_id)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (5, 6, early.call_id, early.call_id)


def test_abandoned_calls_are_named_once_their_undo_is_answered() -> None:
    call_ids = CallIds(1)
    for _ in range(3):
        call_ids.issue(CLAIM, now=0.0)
    undo = call_ids.abandon(2, now=0.0)
    assert undo is not None
    assert call_ids.issue(c.Units(), now=0.0).confirmed == ()
    call_ids.record_answer(undo.call_id)
    assert call_ids.issue(c.Units(), now=0.0).confirmed == (undo.call_id, undo.call_id, 2, 2)
