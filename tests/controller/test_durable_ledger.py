"""A ledger that goes on from its state directory."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.controller import durable_ledger as module
from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings, main
from dataplane.controller.journal import Journal
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import StateDirError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day

SETTINGS = LedgerSettings(reserve_fraction=0.15, heartbeat_s=2.0, session_timeout_s=20.0)


def opened(directory: Path, settings: LedgerSettings = SETTINGS) -> DurableLedger:
    return DurableLedger.open(directory, settings)


Kill = Callable[[DurableLedger], None]


@pytest.fixture
def kill() -> Iterator[Kill]:
    """Lets go of the directory as a killed process does."""
    with contextlib.ExitStack() as after:

        def kill(durable: DurableLedger) -> None:
            durable._journal._lock.close()
            after.callback(durable._journal._db.close)

        yield kill


def a_day(seed: int = 1, steps: int = 200, **settings: Any) -> list[c.Input]:
    driver = Driver(capacity=64 * 1024, **settings)
    a_busy_day(driver, seed, steps)
    return driver.log


def live(durable: DurableLedger, log: list[c.Input]) -> None:
    for item in log:
        durable.apply(item)


def test_a_life_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert not first.recovered
    live(first, a_day())
    before = Ledger.restored(first._ledger.image())
    first.close()
    second = opened(tmp_path)
    assert second.recovered
    assert second.epoch > first.epoch
    before.apply(c.Restarted(epoch=second.epoch, **vars(SETTINGS)))
    assert fingerprint(second._ledger) == fingerprint(before)
    second.close()


def test_records_without_an_image_are_refused(tmp_path: Path) -> None:
    durable = opened(tmp_path)
    durable.apply(c.OpenSession(nonce="n", host="h", name="", protocol_version=PROTOCOL_VERSION))
    durable.close()
    with Journal.open(tmp_path) as journal:
        journal.set_facts(image=None)
    with pytest.raises(StateDirError, match="its table of facts is incomplete"):
        opened(tmp_path)
    assert list(tmp_path.glob("image-*"))


def test_it_goes_on_from_an_image_and_what_came_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NICE", 0)  # it is this process that makes the image
    log = a_day(steps=400)
    first = opened(tmp_path)
    live(first, log[:300])
    assert main([str(tmp_path), "250"]) == 0
    first._journal.begin_from(250)
    live(first, log[300:])
    before = fingerprint(first._ledger)
    assert fingerprint(module.rebuild(first._journal)) == before
    first.close()
    second = opened(tmp_path)
    second.close()
    third = opened(tmp_path)
    assert third._ledger.epoch == third.epoch > second.epoch > first.epoch
    third.close()


@pytest.mark.integration
def test_images_are_made_beside_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMAGE_AFTER_RECORDS", 50)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    log = a_day(steps=400)
    durable = opened(tmp_path)
    live(durable, log[:100])
    maker = durable._images._process
    if maker is not None:  # it may have ended, and been seen, by now
        assert maker.wait(60) == 0
    live(durable, log[100:])
    number = durable._journal.fact("image")
    assert isinstance(number, int)
    assert number >= 50
    expected = fingerprint(durable._ledger)
    assert fingerprint(module.rebuild(durable._journal)) == expected
    durable.close()


def test_ticks_at_which_nothing_is_due_need_no_record_of_their_own(tmp_path: Path) -> None:
    durable = opened(tmp_path)
    durable.apply(c.OpenSession(nonce="n", host="h", name="", protocol_version=PROTOCOL_VERSION))
    before = durable._journal.last
    for n in range(10):
        assert durable.apply(c.Tick(now=1.0 + n / 100)) == []
    assert durable._journal.last == before
    durable.apply(c.Heartbeat(session=1))
    assert [type(messages.decode(record)) for _, record in durable._journal.records(before)] == [
        c.Tick,
        c.Heartbeat,
    ]
    durable.apply(c.Tick(now=1.2))
    now = durable._ledger.now
    durable.close()
    with Journal.open(tmp_path) as journal:
        assert module.rebuild(journal).now == now == 1.2


@pytest.mark.parametrize("seed", range(5))
def test_ticks_at_which_nothing_is_due_only_pass_time(seed: int) -> None:
    log, chance = a_day(seed, 400), random.Random(seed)
    following = [item.now if isinstance(item, c.Tick) else math.inf for item in log]
    for place in reversed(range(len(log) - 1)):
        following[place] = min(following[place], following[place + 1])
    each, last = Ledger(7), Ledger(7)
    for item, tick in zip(log, following, strict=True):
        before = min(tick, each.next_deadline() or math.inf, each.now + 1.0)
        times = sorted(chance.uniform(each.now, before) for _ in range(3)) if before > each.now else []
        times = [time for time in times if time < before]
        assert not any(each.apply(c.Tick(now=time)) for time in times)
        assert not any(last.apply(c.Tick(now=time)) for time in times[-1:])
        assert repr(each.apply(item)) == repr(last.apply(item))
    assert fingerprint(each) == fingerprint(last)


def test_images_of_small_ledgers_are_made_in_passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_AFTER_RECORDS", 30)
    durable = opened(tmp_path)
    for item in a_day(steps=400):
        durable.apply(item)
        number = durable._journal.fact("image")
        assert isinstance(number, int)
        assert durable._journal.last - number <= 31
        assert durable._images._process is None
    assert number > 300
    assert fingerprint(module.rebuild(durable._journal)) == fingerprint(durable._ledger)
    durable.close()


def test_an_input_counts_though_the_image_after_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        raise StateDirError(directory=str(tmp_path), why="it is full")

    monkeypatch.setattr(module, "SMALL_AFTER_RECORDS", 1)
    durable = opened(tmp_path)
    monkeypatch.setattr(durable._journal, "begin_from", fail)
    (answer,) = durable.apply(c.OpenSession(nonce="n", host="h", name="", protocol_version=PROTOCOL_VERSION))
    assert isinstance(answer, c.Opened)
    assert "Image of the ledger could not be written" in caplog.text
    durable.close()
    with Journal.open(tmp_path) as journal:
        assert answer.session in module.rebuild(journal)._state.sessions


def test_a_long_log_is_gone_through_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path)
    live(first, a_day())
    last = first._journal.last
    first.close()
    monkeypatch.setattr(module, "SMALL_AFTER_RECORDS", 50)
    second = opened(tmp_path)
    assert second._journal.fact("image") == last
    second.close()


@pytest.mark.integration
def test_a_failed_image_is_told_and_the_journal_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "IMAGE_AFTER_RECORDS", 10)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    log = a_day()
    durable = opened(tmp_path)
    live(durable, log[:20])
    maker = durable._images._process
    if maker is not None:  # it may have failed, and been seen, by now
        maker.wait(60)
    live(durable, log[20:])
    assert "Image of the ledger could not be written" in caplog.text
    expected = fingerprint(durable._ledger)
    assert fingerprint(module.rebuild(durable._journal)) == expected
    durable.close()


def test_its_clock_goes_on(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.apply(c.Tick(now=1000.0))
    first.close()
    second = opened(tmp_path)
    second.apply(c.Tick(now=5.0))
    assert second._ledger.now == 1000.0
    second.apply(c.Tick(now=7.5))
    assert second._ledger.now == 1002.5
    client = Driver(units=0)
    client.ledger = second._ledger
    client.client()
    deadline = second.next_deadline()
    assert deadline is not None
    assert 7.5 <= deadline <= 7.5 + SETTINGS.heartbeat_s
    second.close()


def test_settings_are_those_of_the_new_run(tmp_path: Path) -> None:
    opened(tmp_path).close()
    durable = opened(tmp_path, replace(SETTINGS, session_timeout_s=77.0))
    assert durable._ledger._state.session_timeout_s == 77.0
    durable.close()


def test_what_cannot_be_written_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = opened(tmp_path)
    log = a_day()
    live(durable, log[:10])
    before = fingerprint(durable._ledger)

    def full(self: Journal, record: bytes) -> None:
        raise self.error("cannot be written: database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        for item in log[10:20]:
            with pytest.raises(StateDirError, match="disk is full"):
                durable.apply(item)
    assert fingerprint(durable._ledger) == before
    live(durable, log[10:])
    durable.close()


def test_a_failure_of_the_ledger_is_the_same_failure_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    durable = opened(tmp_path)
    live(durable, a_day()[:20])
    with pytest.raises(ValueError, match="must be greater than the current epoch"):
        durable.apply(c.Restarted(epoch=1, **vars(SETTINGS)))
    before = fingerprint(durable._ledger)
    assert fingerprint(module.rebuild(durable._journal)) == before
    durable.close()
    with caplog.at_level(logging.ERROR):
        opened(tmp_path).close()
    assert "the ledger failed on Restarted" in caplog.text


def test_a_machine_that_crashed_begins_anew_and_keeps_the_rest_aside(
    tmp_path: Path, kill: Kill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    live(first, a_day())
    first._journal.set_facts(boot="another boot")
    kill(first)
    second = opened(tmp_path)
    assert not second.recovered
    assert "may be incomplete and was moved to" in caplog.text
    (aside,) = tmp_path.glob("before-*")
    assert {path.name for path in aside.iterdir()} >= {"journal.sqlite", "image-0"}
    second.close()


def test_an_orderly_stop_survives_a_boot_but_memory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    add = next(item for item in a_day() if isinstance(item, c.AddUnit))
    first.apply(msgspec.structs.replace(add, host="boot 1"))
    first.apply(msgspec.structs.replace(add, cookie="another"))
    first._journal.set_facts(boot="boot 1")
    first.close()
    second = opened(tmp_path)
    assert second.recovered
    assert "its rows are lost" in caplog.text
    assert list(second._ledger._state.units) == [2]
    second.close()


@pytest.mark.integration
def test_the_process_that_makes_images_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dataplane.controller.durable_ledger", str(tmp_path), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the state directory" in done.stderr
    assert "Traceback" not in done.stderr
