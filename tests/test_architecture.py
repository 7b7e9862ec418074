"""`docs/architecture.md` names the files that a put, a claim and a read enter: all of them, and no others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from dataplane import DataPlaneClient, connect, serve
from tests.entered_files import Controller, Entered, entered

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
EVERY = "Every command"
CALLS = ("put_samples", "claim_meta", "get_batch")
SHORT = {"put_samples": ("A small put", ["PutRows"]), "get_samples": ("A small read", ["LocateRows"])}
"""The short ways: title of the section, and commands."""
PLANS = {"ledger/commands/short.py", "core/types.py"}
"""Files that only the first call of a short way enters, which encodes or decodes the plan."""
SIDES = {"client": "on the client", "controller": "in the controller"}
"""The first heading of the tables of a section."""

NEVER_S = 86_400.0
"""The time to the first heartbeat. A heartbeat borrows the idle sockets, so that a call has to open another one."""
SETTINGS = {"capacity_bytes": 64 << 20, "heartbeat_s": NEVER_S, "session_timeout_s": NEVER_S}
"""The arena never grows: this much has memory from the start."""
ROWS = 65
"""Samples of a call that takes no short way."""
LARGE, SMALL = 1000, 5
"""Tokens of a row. A put of `ROWS` large rows reserves its own space, whatever time has passed since the last put. Its
runs of bytes are too short for the threads that copy long ones."""


def section(title: str) -> str:
    """Return the text below a heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found is not None, f"the page has no section {title}"
    return found[1]


def rows(title: str, side: str) -> list[list[str]]:
    """Return the files of each row of a section's table for one side."""
    table = re.search(rf"^\| {SIDES[side]} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section(title), re.M)
    assert table is not None, f"section {title} has no table '{SIDES[side]}'"
    return [re.findall(r"`([\w/.]+)`", row.split("|")[1]) for row in table[1].splitlines()]


def named(call: str, side: str) -> list[str]:
    """Return the files that the page names for a call: those of every command, and its own."""
    return [path for title in (EVERY, f"`{call}`") for row in rows(title, side) for path in row]


def named_short(call: str, side: str) -> list[str]:
    """Return the files that the page names for the short way of a call, besides those of every command."""
    return [path for row in rows(SHORT[call][0], side) for path in row]


def commands(call: str) -> list[str]:
    """Return the commands that the page names for a call, in their order."""
    line = re.search(r"^Commands: (.+)\.$", section(f"`{call}`"), re.M)
    assert line is not None, f"the walk of {call} has no line 'Commands: ...'"
    return re.findall(r"`(\w+)`", line[1])


def difference(call: str, side: str, names: list[str], ran: list[str]) -> str:
    """Return what to change in the page, "" if it is right."""
    missing, extra = sorted(set(ran) - set(names)), sorted(set(names) - set(ran))
    lists = [f"{word}: {', '.join(files)}" for word, files in (("missing", missing), ("extra", extra)) if files]
    return f"{call}, {SIDES[side]}, docs/architecture.md: {'; '.join(lists)}" if lists else ""


class Service:
    """A service and a client whose caches are warm. The files that a call enters are recorded."""

    def __init__(self, client: DataPlaneClient, controller: Controller) -> None:
        self._client, self._controller = client, controller
        self._puts = 0
        client.register_partition("train", ["x", "reward"], num_samples=None, consumer_tasks=["policy"])
        for _ in range(2):
            self.walk(ROWS, LARGE)

    def walk(self, count: int, tokens: int) -> dict[str, Entered]:
        """Put, claim and read as many new samples; return what each call entered."""
        self._puts += 1
        ids = [f"{self._puts}-{number}" for number in range(count)]
        fields = {"x": [torch.arange(tokens + number) for number in range(count)], "reward": torch.zeros(count)}
        client, controller = self._client, self._controller
        client.stats()  # confirms the read of the walk before, so that the put does not
        _, put = entered(controller, lambda: client.put_samples(ids, "train", fields))
        meta, claim = entered(controller, lambda: client.claim_meta("train", "policy", ["x"], batch_size=count))
        assert meta.sample_ids == ids
        batch, read = entered(controller, lambda: client.get_batch(meta))
        assert batch["x"].shape == (count, tokens + count - 1)
        return dict(zip(CALLS, (put, claim, read), strict=True))

    def walk_short(self) -> dict[str, Entered]:
        """Put and read one small sample the short way, after as many attempts as ask for space first."""
        client = self._client
        fields = {"x": [torch.arange(SMALL)], "reward": torch.zeros(1)}
        names = ["short"]
        walk: dict[str, Entered] = {}
        short = 0  # the walks so far that took both short ways; the second one finds warm caches
        for _ in range(100):
            _, put = entered(self._controller, lambda: client.put_samples(names, "train", fields))
            _, read = entered(self._controller, lambda: client.get_samples(names, "train", list(fields)))
            client.clear_samples(names, "train")
            walk = {"put_samples": put, "get_samples": read}
            short += all(walk[call].commands == commands for call, (_, commands) in SHORT.items())
            if short == 2:
                break
        return walk


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    controller = Controller()
    with controller.watching():
        server = serve(SETTINGS)
    with server, connect(server.address, heartbeat_s=NEVER_S) as client:
        yield Service(client, controller)


@pytest.fixture(scope="module")
def walks(service: Service) -> dict[str, Entered]:
    return service.walk(ROWS, LARGE)


@pytest.fixture(scope="module")
def short_walks(service: Service, walks: dict[str, Entered]) -> dict[str, Entered]:
    return service.walk_short()


@pytest.fixture(scope="module")
def small_walks(service: Service, walks: dict[str, Entered]) -> list[dict[str, Entered]]:
    """Puts with space of their own, with space requested in advance, or with a part of that: the time between two puts
    decides. A put whose request was rejected sends a third command. That happens until the unit has reported the
    session to the controller."""
    return [walk for walk in (service.walk(1, SMALL) for _ in range(3)) if len(walk["put_samples"].commands) < 3]


@pytest.mark.integration
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("call", CALLS)
def test_the_page_names_the_files_that_a_call_enters(walks: dict[str, Entered], call: str, side: str) -> None:
    message = difference(call, side, named(call, side), getattr(walks[call], side))
    assert not message, message


@pytest.mark.integration
@pytest.mark.parametrize("call", CALLS)
def test_the_page_names_the_commands_of_a_call(walks: dict[str, Entered], call: str) -> None:
    assert walks[call].commands == commands(call)


@pytest.mark.integration
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("call", CALLS)
def test_rows_are_in_the_order_of_the_call(walks: dict[str, Entered], call: str, side: str) -> None:
    """Rows of several files are helpers, which may be anywhere."""
    ran = getattr(walks[call], side)
    for title in (EVERY, f"`{call}`"):
        single = [row[0] for row in rows(title, side) if len(row) == 1 and row[0] in ran]
        assert single == sorted(single, key=ran.index), f"{title}, {SIDES[side]}"


@pytest.mark.integration
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("call", SHORT)
def test_the_page_names_the_files_of_the_short_ways(short_walks: dict[str, Entered], call: str, side: str) -> None:
    title, names = SHORT[call]
    assert short_walks[call].commands == names
    every = [path for row in rows(EVERY, side) for path in row]
    ran = [path for path in getattr(short_walks[call], side) if path not in every]
    message = difference(title, side, named_short(call, side), ran)
    assert not message, message


@pytest.mark.integration
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("call", CALLS)
def test_small_samples_enter_no_other_files(small_walks: list[dict[str, Entered]], call: str, side: str) -> None:
    assert small_walks
    small = {path for walk in small_walks for path in getattr(walk[call], side)}
    ways = {"put_samples": "put_samples", "get_batch": "get_samples"}
    short = set(named_short(ways[call], side)) if call in ways else set()
    assert sorted(small - set(named(call, side)) - short - PLANS) == []


@pytest.mark.integration
def test_an_earlier_profile_function_is_restored(service: Service) -> None:
    def earlier(frame: FrameType, event: str, result: object) -> None:
        """Do nothing."""

    before = sys.getprofile()
    sys.setprofile(earlier)
    try:
        service.walk(ROWS, LARGE)
        assert sys.getprofile() is earlier
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("title", [EVERY, *(f"`{call}`" for call in CALLS)])
def test_a_table_names_each_file_once(title: str, side: str) -> None:
    names = [path for row in rows(title, side) for path in row]
    assert names
    assert [path for path in names if names.count(path) > 1] == []


def test_a_message_lists_what_is_missing_and_what_is_extra() -> None:
    message = difference("get_batch", "client", ["a.py", "b.py"], ["b.py", "c.py"])
    assert message.endswith("missing: c.py; extra: a.py")
