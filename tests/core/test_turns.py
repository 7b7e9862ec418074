"""Turns: the first of all its keys is ready, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.session_state import Turn, Turns

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
    assert len(turns) == 0
