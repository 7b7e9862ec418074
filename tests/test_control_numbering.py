"""Numbers, the watermark, and the undoing of calls that nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.control.numbering import Numbering, undo_of
from dataplane.ledger import commands as c

ALLOCATE = c.Allocate(partition="p", columns=())
LOCATE = c.Locate(partition="p", samples=c.Samples(ids=()), fields=())
CLAIM = c.Claim(partition="p", task="t", fields=(), batch_size=1)
COMMIT = c.Commit(
    partition="p",
    samples=c.Samples(rows=np.array([], np.int64), births=np.array([], np.int64)),
    mode=c.Mode.UPDATE,
    reservation=7,
)


def test_numbers_count_up_and_carry_the_lowest_unanswered() -> None:
    numbering = Numbering(5)
    first, second = numbering.issue(c.Units(), now=0.0), numbering.issue(c.Stats(), now=0.0)
    assert (first.session, first.number, first.watermark) == (5, 1, 1)
    assert (second.number, second.watermark) == (2, 1)
    numbering.answered(1)
    assert numbering.issue(c.Units(), now=0.0).watermark == 2
    numbering.answered(3)
    numbering.answered(2)
    assert numbering.watermark == 4
    assert numbering.unanswered == 0


def test_answers_may_come_twice_and_for_numbers_never_issued() -> None:
    numbering = Numbering(1)
    numbering.issue(c.Units(), now=0.0)
    for number in (1, 1, 99):
        numbering.answered(number)
    assert numbering.watermark == 2


def test_a_repeat_is_the_same_command_with_the_watermark_of_now() -> None:
    numbering = Numbering(1)
    numbering.issue(c.Units(), now=0.0)
    numbering.issue(c.Stats(), now=0.0)
    numbering.answered(1)
    again = numbering.repeat(2, now=1.0)
    assert (again.number, again.watermark, type(again.command)) == (2, 2, c.Stats)


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
    numbering = Numbering(1)
    numbering.issue(command, now=0.0)
    call = numbering.abandon(1, now=1.0)
    assert call is not None
    assert type(call.command) is type(undo)
    assert repr(call.command) == repr(undo)
    assert (call.number, call.watermark) == (2, 1)
    numbering.answered(1)  # the late answer of the abandoned call settles nothing
    assert numbering.watermark == 1
    assert numbering.issue(c.Stats(), now=1.0).watermark == 1
    numbering.answered(2)
    assert numbering.watermark == 3


def test_a_call_without_an_undo_is_below_the_watermark_once_abandoned() -> None:
    numbering = Numbering(1)
    numbering.issue(c.Clear(partition="p", samples=None), now=0.0)
    assert numbering.abandon(1, now=0.0) is None
    assert numbering.watermark == 2
    assert undo_of(1, c.Commit(partition="p", samples=c.Samples(ids=()), mode=c.Mode.UPSERT)) is None


def test_abandoning_twice_or_after_the_answer_undoes_nothing_more() -> None:
    numbering = Numbering(1)
    numbering.issue(CLAIM, now=0.0)
    assert numbering.abandon(1, now=0.0) is not None
    assert numbering.abandon(1, now=0.0) is None
    numbering.issue(CLAIM, now=0.0)
    numbering.answered(3)
    assert numbering.abandon(3, now=0.0) is None


def test_posted_calls_come_due_until_they_are_answered() -> None:
    numbering = Numbering(1)
    numbering.issue(c.Release(located=1), now=0.0, posted=True)
    numbering.issue(c.Stats(), now=0.0)
    assert numbering.due(0.0) == []
    assert numbering.due(0.5) == [1]
    numbering.repeat(1, now=1.0)
    assert numbering.due(0.5) == []
    assert numbering.due(2.0) == [1]
    numbering.answered(1)
    assert numbering.due(2.0) == []


def test_a_call_that_waits_long_is_named_apart_and_stops_no_others() -> None:
    numbering = Numbering(1, hold=3)
    numbering.issue(CLAIM, now=0.0)
    for number in (2, 3):
        assert numbering.issue(c.Units(), now=0.0).waiting == ()
        numbering.answered(number)
    fourth = numbering.issue(c.Units(), now=0.0)
    assert (fourth.number, fourth.watermark, fourth.waiting) == (4, 4, (1,))
    again = numbering.repeat(1, now=0.0)
    assert (again.number, again.watermark, again.waiting) == (1, 4, (1,))
    undo = numbering.abandon(1, now=0.0)
    assert undo is not None
    assert (undo.watermark, undo.waiting) == (4, (1,))
    numbering.answered(4)
    numbering.answered(undo.number)
    assert (numbering.watermark, numbering.waiting) == (6, ())
