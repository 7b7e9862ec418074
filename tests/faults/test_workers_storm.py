"""The reckoning of a storm over workers, and a short storm; `make faults` has a long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.books import StormError
from tests.faults.workers_books import WorkersBooks
from tests.faults.workers_roles import lanes
from tests.faults.workers_storm import dealt, every_fault

ROOT = Path(__file__).parents[2]


def outstanding(folder: Path, **notes: str) -> list[str]:
    """What the books make of these notes, by worker, their lines parted by commas."""
    for name, lines in notes.items():
        (folder / f"{name}.notes").write_text("".join(f"{line.strip()}\n" for line in lines.split(",")))
    return WorkersBooks(folder).outstanding()


SENT = "run 1, sending b 1.1, sent b 1.1, sending b 1.2, sent b 1.2, sending b 1.3, sent b 1.3"


def test_messages_that_come_once_and_in_order_are_right(tmp_path: Path) -> None:
    assert outstanding(tmp_path, a=SENT, b="run 1, got a 1.1, got a 1.2, got a 1.3") == []


def test_messages_that_have_yet_to_come(tmp_path: Path) -> None:
    assert outstanding(tmp_path, a=SENT, b="run 1, got a 1.1") == ["a to b: (1, 2)", "a to b: (1, 3)"]


@pytest.mark.parametrize(
    ("received", "why"),
    [
        ("got a 1.1, got a 1.1", "received after"),
        ("got a 1.2, got a 1.1", "received after"),
        ("got a 1.1, got a 1.4", "never sent"),
        ("got a 1.1, got a 1.3", "nobody was told"),
        ("got a 1.1, missed a MessageTimeoutError, got a 1.3", "nobody was told"),
    ],
)
def test_messages_that_come_wrong(tmp_path: Path, received: str, why: str) -> None:
    with pytest.raises(StormError, match=why):
        outstanding(tmp_path, a=SENT, b=f"run 1, {received}")


@pytest.mark.parametrize("told", ["missed a WorkerLostError", "run 2"])
def test_a_message_may_be_lost_where_its_receiver_is_told(tmp_path: Path, told: str) -> None:
    assert outstanding(tmp_path, a=SENT, b=f"run 1, got a 1.1, {told}, got a 1.3") == []
    assert outstanding(tmp_path, a=SENT, b=f"run 1, got a 1.1, {told}") == []


def test_a_message_may_be_lost_where_its_sender_is_told(tmp_path: Path) -> None:
    told = f"{SENT}, sending b 1.4, unsent b 1.4 WorkerLostError, sending b 1.5, sent b 1.5"
    assert outstanding(tmp_path, a=told, b="run 1, got a 1.1, got a 1.2, got a 1.5") == []
    assert outstanding(tmp_path, a=told, b="run 1, got a 1.1, got a 1.2, got a 1.3") == ["a to b: (1, 5)"]


PUT = "run 1, putting c b a:1.1@h:1, put c b a:1.1@h:1, putting c b a:1.2@h:1, put c b a:1.2@h:1"


def test_items_that_are_taken_once_and_in_order_are_right(tmp_path: Path) -> None:
    assert outstanding(tmp_path, a=PUT, b="run 1, taken c b a:1.1@h:1 a:1.2@h:1") == []
    assert outstanding(tmp_path, a=PUT, b="run 1, taken c b a:1.1@h:1") == ["c, key b: a:1.2@h:1"]


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        ("taken c b a:1.1@h:1, taken c b a:1.1@h:1", "taken twice"),
        ("taken c b a:1.2@h:1, taken c b a:1.1@h:1", "was taken after"),
        ("taken c b a:1.3@h:1", "never put"),
    ],
)
def test_items_that_are_taken_wrong(tmp_path: Path, taken: str, why: str) -> None:
    with pytest.raises(StormError, match=why):
        outstanding(tmp_path, a=PUT, b=f"run 1, {taken}")


def test_an_item_whose_putter_was_told_that_it_was_not_put(tmp_path: Path) -> None:
    refused = "run 1, putting c b a:1.1@h:1, unput c b a:1.1@h:1 ChannelTimeoutError"
    with pytest.raises(StormError, match="was told"):
        outstanding(tmp_path, a=refused, b="run 1, taken c b a:1.1@h:1")


def test_items_may_be_lost_with_their_broker_or_on_their_way_to_a_dead_getter(tmp_path: Path) -> None:
    assert outstanding(tmp_path, a=PUT, b="run 1, taken c b a:1.1@h:1, run 2") == []
    assert outstanding(tmp_path, a=PUT, b="run 1, taken c b a:1.1@h:1", scene="dead h:1") == []


def test_each_thing_that_a_worker_does_has_a_place_of_its_own() -> None:
    assert lanes("near")[:2] == ["send far", "send aside"]
    assert len(set(lanes("far"))) == 8


def test_every_kind_of_fault_comes_once() -> None:
    every = every_fault(cabled=True)
    assert len(every) == len(set(every)) > len(every_fault(cabled=False))
    hands = dealt(every, 3)
    assert sorted(map(str, every)) == sorted(str(fault) for hand in hands for fault in hand)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_short_storm() -> None:
    command = [sys.executable, "-m", "tests.faults.workers_storm", "--seed", "11", "--faults", "3"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    assert "once each and in order" in told.stdout
    assert "4 faults in" in told.stdout
