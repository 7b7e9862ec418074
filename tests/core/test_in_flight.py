from __future__ import annotations

import threading

from dataplane.core.in_flight import InFlight
from tests.restarts import WAIT_S


def test_a_call_is_under_way_from_its_entry_until_it_leaves() -> None:
    calls = InFlight()
    with (call := threading.Lock()):
        assert calls.enter(call)
        assert calls.enter(call), "a call may enter twice"
        assert len(calls) == 1
        calls.leave(call)
        assert calls.wait(0.0) == len(calls) == 0


def test_a_call_that_could_not_leave_is_under_way_until_it_releases_its_lock() -> None:
    calls = InFlight()
    with (call := threading.Lock()):
        calls.enter(call)
        assert calls.wait(0.0) == 1
    assert calls.wait(0.0) == len(calls) == 0


def test_after_shut_only_those_enter_that_are_under_way() -> None:
    calls = InFlight()
    with (call := threading.Lock()), (late := threading.Lock()):
        calls.enter(call)
        calls.shut()
        assert calls.enter(call)
        assert not calls.enter(late)
        assert len(calls) == 1


def test_what_a_call_handed_over_is_waited_for() -> None:
    calls = InFlight()
    with (call := threading.Lock()):
        calls.enter(call)
        calls.shut()
        heir = calls.hand_over(call)
        calls.leave(call)
    assert calls.wait(0.0) == 1
    ended = threading.Thread(target=heir.release)
    ended.start()
    assert calls.wait(WAIT_S) == 0
    ended.join()
