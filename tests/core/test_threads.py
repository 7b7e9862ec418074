"""Small parts for threads and failures."""

from __future__ import annotations

import ast
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.session_state import Turn, Turns
from dataplane.core import durations, failpoints
from dataplane.core.durations import Backoff
from dataplane.core.helpers import Helpers
from dataplane.core.in_flight import InFlight
from dataplane.core.limited_log import LimitedLog, OneLine
from tests.restarts import WAIT_S

# --- Helpers of a calling thread


MEET_S = 60.0


@pytest.fixture
def together():
    made = Helpers(3)
    yield made
    made.close()


def test_jobs_run_at_the_same_time_and_results_come_in_order(together):
    meet = threading.Barrier(4)

    def job(number):
        meet.wait(MEET_S)
        return number

    assert together.run([lambda n=n: job(n) for n in range(4)]) == [0, 1, 2, 3]
    assert together.run([lambda: "alone"]) == ["alone"]


def test_more_jobs_than_threads_are_all_done(together):
    assert together.run([lambda n=n: n for n in range(50)]) == list(range(50))


def test_an_error_is_raised_when_the_others_have_ended_and_no_more_begin(together):
    begun, failing, ended = threading.Barrier(4), threading.Event(), []

    def fails():
        begun.wait(MEET_S)
        failing.set()
        raise OSError("broken")

    def goes_on():
        begun.wait(MEET_S)
        assert failing.wait(MEET_S)
        ended.append("well")

    with pytest.raises(OSError, match="broken"):
        together.run([goes_on, fails, goes_on, goes_on])
    assert ended == ["well"] * 3


def test_an_interrupt_waits_for_the_others(together):
    begun, may_end, ended = threading.Barrier(2), threading.Event(), []

    def other():
        begun.wait(MEET_S)
        assert may_end.wait(MEET_S)
        ended.append(threading.current_thread())

    def interrupted():
        begun.wait(MEET_S)
        may_end.set()
        raise KeyboardInterrupt

    caller = threading.current_thread()
    jobs = [lambda: interrupted() if threading.current_thread() is caller else other()] * 2
    with pytest.raises(KeyboardInterrupt):
        together.run(jobs)
    assert len(ended) == 1


def test_it_is_closed_twice_and_may_be_used_again(together):
    together.run([list, list])
    together.close()
    together.close()
    assert together.run([list, list]) == [[], []]


def test_an_interrupt_between_jobs_is_waited_for_by_nobody(together, monkeypatch):
    """It may come while the caller looks whether the others have ended."""

    interrupted = threading.Event()

    class Interrupting(threading.Condition):
        def __exit__(self, *error):
            super().__exit__(*error)
            if threading.current_thread() is caller and not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt

    mine = SimpleNamespace(Condition=Interrupting, Thread=threading.Thread)
    monkeypatch.setattr("dataplane.core.helpers.threading", mine)
    outcomes = []

    def run():
        try:
            together.run([list, list])
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    caller.join(MEET_S)
    assert outcomes == ["interrupted"]


# --- in flight


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


# --- Turns: the first of all its keys is ready, and no other.


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


# --- Pauses between attempts.


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jitter."""
    monkeypatch.setattr(durations, "jittered", lambda pause_s: pause_s)


@pytest.mark.usefixtures("exact")
def test_each_pause_is_twice_the_last_up_to_the_longest() -> None:
    pauses = Backoff(0.1, 0.5)
    assert [pauses.take() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    pauses.reset()
    assert (pauses.next_s, pauses.take(), pauses.next_s) == (0.1, 0.1, 0.2)


@pytest.mark.usefixtures("exact")
def test_a_bound_shortens_one_pause_only() -> None:
    pauses = Backoff(1.0, 8.0)
    assert [pauses.take(0.3), pauses.take(), pauses.take(3.0), pauses.take()] == [0.3, 2.0, 3.0, 8.0]


def test_jitter_takes_up_to_half_and_nothing_from_the_programs_random_numbers() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    pauses = {Backoff(1.0, 1.0).take() for _ in range(50)}
    assert random.random() == expected
    assert len(pauses) > 25
    assert all(0.5 <= pause <= 1.0 for pause in pauses)


# --- The end that signals ask for.


AT_EVERY_STEP = """
import os, signal, sys
from queue import SimpleQueue
from dataplane.core.stopping import Stop

class Watched(SimpleQueue):
    def get(self):
        if self.empty():  # no signal has come: instead of blocking, end the last of the calls
            self.put(None)
        return super().get()

def is_asked_at(step):
    # Sends SIGTERM at one bytecode of `wait`. Returns False if `wait` has fewer.
    stop, done = Stop(), 0
    stop._queue = Watched()

    def trace(frame, event, argument):
        nonlocal done
        frame.f_trace_opcodes = True
        if event == "opcode":
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    stop.wait()
    sys.settrace(before)
    return stop.asked

step = 1
while is_asked_at(step):
    step += 1
print(step)
"""


@pytest.mark.integration
def test_a_signal_that_comes_as_the_wait_begins_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EVERY_STEP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


# --- What strangers send fills no log.


def test_one_line_is_let_through_and_the_next_says_how_many_were_not() -> None:
    now = [0.0]
    lines = LimitedLog(logging.getLogger("a server"), lambda: now[0])
    assert lines.take("refused:\n  a thing") == "refused: a thing"
    assert [lines.take("again") for _ in range(3)] == [None] * 3
    now[0] = 10.0
    assert lines.take("once more") == "once more (earlier lines of this kind not logged: 3)"
    now[0] = 20.0
    assert lines.take("last") == "last"


def test_a_warning_is_logged_unless_it_is_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    lines = LimitedLog(logging.getLogger("a server"), lambda: 0.0)
    for _ in range(3):
        lines.write(logging.WARNING, "refused: 100 %s")
    assert caplog.messages == ["refused: 100 %s"]


def test_a_traceback_of_a_library_becomes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("a library")
    quiet = OneLine(LimitedLog(library))
    library.addFilter(quiet)
    for _ in range(3):
        try:
            raise ValueError("it\nbroke")
        except ValueError:
            library.exception("failed on %s", "a call")
    library.warning("no traceback")
    library.warning("no traceback")
    assert caplog.messages == ["failed on a call: ValueError('it\\nbroke')", "no traceback", "no traceback"]
    assert "Traceback" not in caplog.text


# --- failpoints


ROOT = Path(__file__).parents[2]


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every text that could be the name of a failpoint, f-strings with `*` for what is filled in."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in tree.values)
        return
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from names_in(child)


def reached_in(tree: ast.AST) -> Iterator[str]:
    """The names that are given to `failpoint` directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "failpoint":
                yield from names_in(node.args[0])


def test_the_list_is_complete_and_each_place_is_there() -> None:
    paths = [path for folder in ("dataplane", "workers") for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in paths if path.name != "failpoints.py"]
    reached = {name for tree in trees for name in reached_in(tree)}
    assert reached <= failpoints.NAMES
    known = {name for tree in trees for name in names_in(tree)}
    assert known >= failpoints.NAMES


def test_an_unknown_place_cannot_be_armed() -> None:
    with pytest.raises(ValueError, match=r"put\.before_comit"):
        failpoints.arm("put.before_comit", lambda: None)


def test_an_armed_place_runs_its_action_until_it_is_disarmed() -> None:
    reached: list[str] = []
    failpoints.arm("call.Commit.before", lambda: reached.append("there"))
    failpoints.failpoint("call.Commit.before")
    failpoints.failpoint("call.Commit.after")
    failpoints.disarm()
    failpoints.failpoint("call.Commit.before")
    assert reached == ["there"]
