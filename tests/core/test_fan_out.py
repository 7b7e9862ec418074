from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from dataplane.core.fan_out import Together

WAIT_S = 60.0


@pytest.fixture
def together():
    made = Together(3)
    yield made
    made.close()


def test_jobs_run_at_the_same_time_and_results_come_in_order(together):
    meet = threading.Barrier(4)

    def job(number):
        meet.wait(WAIT_S)
        return number

    assert together.run([lambda n=n: job(n) for n in range(4)]) == [0, 1, 2, 3]
    assert together.run([lambda: "alone"]) == ["alone"]


def test_more_jobs_than_threads_are_all_done(together):
    assert together.run([lambda n=n: n for n in range(50)]) == list(range(50))


def test_an_error_is_raised_when_the_others_have_ended_and_no_more_begin(together):
    begun, failing, ended = threading.Barrier(4), threading.Event(), []

    def fails():
        begun.wait(WAIT_S)
        failing.set()
        raise OSError("broken")

    def goes_on():
        begun.wait(WAIT_S)
        assert failing.wait(WAIT_S)
        ended.append("well")

    with pytest.raises(OSError, match="broken"):
        together.run([goes_on, fails, goes_on, goes_on])
    assert ended == ["well"] * 3


def test_an_interrupt_waits_for_the_others(together):
    begun, may_end, ended = threading.Barrier(2), threading.Event(), []

    def other():
        begun.wait(WAIT_S)
        assert may_end.wait(WAIT_S)
        ended.append(threading.current_thread())

    def interrupted():
        begun.wait(WAIT_S)
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
    """It may come after a job was begun by the books, and before it was."""

    interrupted = threading.Event()

    class Interrupting(threading.Condition):
        def __exit__(self, *error):
            super().__exit__(*error)
            if threading.current_thread() is caller and not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt

    mine = SimpleNamespace(Condition=Interrupting, get_ident=threading.get_ident)
    monkeypatch.setattr("dataplane.core.fan_out.threading", mine)
    outcomes = []

    def run():
        try:
            together.run([lambda: interrupted.wait(WAIT_S)] * 2)
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    caller.join(WAIT_S)
    assert outcomes == ["interrupted"]
