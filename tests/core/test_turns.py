"""Turns: the first of all its keys is ready, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.turns import Turn, Turns
from tests.restarts import WAIT_S

KEYS = st.lists(st.integers(0, 3), max_size=4)


@given(st.lists(st.one_of(KEYS, st.integers(0, 9)), max_size=40))
def test_a_turn_is_ready_when_no_earlier_one_shares_a_key(steps: list[list[int] | int]) -> None:
    """A list enters a turn for these keys; a number ends one of those entered, ready or not."""
    turns, entered, at_once = Turns(), list[Turn](), set[Turn]()
    for step in steps:
        if isinstance(step, list):
            turn = Turn(step)
            if turns.enter(turn):
                at_once.add(turn)
            entered.append(turn)
        elif entered:
            turns.leave(entered.pop(step % len(entered)))
        for place, turn in enumerate(entered):
            free = not any(turn.keys & earlier.keys for earlier in entered[:place])
            assert (turn in at_once or turn.ready.done()) == free
    for turn in entered:
        turns.leave(turn)
        turns.leave(turn)
    assert len(turns) == 0


def test_a_turn_that_was_never_entered_can_end() -> None:
    turns = Turns()
    waits, never = Turn("a"), Turn("a")
    assert turns.enter(Turn("a"))
    assert not turns.enter(waits)
    turns.leave(never)
    assert not waits.ready.done()


INTERRUPTED = """
from dataplane.core.turns import Turn, Turns
from tests.interrupting import bytecodes_of

def ends(stop_at):
    turns, ends, waits = Turns(), Turn("ab"), Turn("bc")
    assert turns.enter(ends) and not turns.enter(waits)
    try:
        return bytecodes_of(lambda: turns.leave(ends), stop_at, within=("core/turns.py",))
    except KeyboardInterrupt:
        turns.leave(ends)
    finally:
        assert waits.ready.done()
        turns.leave(waits)
        assert len(turns) == 0

total = ends(0)
assert sum(ends(stop_at) is None for stop_at in range(1, total + 1)) > total // 2
"""


@pytest.mark.integration
def test_an_interrupted_end_of_a_turn_can_be_repeated() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
