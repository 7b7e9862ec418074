"""The parts of the page that only reckon, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from dataplane import serve
from tests.ui.conftest import visitor

pytestmark = pytest.mark.browser

UNIT = {
    "unit": 1,
    "name": "unit-0",
    "connected": True,
    "problem": "",
    "pressed": False,
    "used_bytes": 9 << 20,
    "limit_bytes": 10 << 20,
}
PARTITION = {
    "partition": "train",
    "pressed": False,
    "evicted_unconsumed": 0,
    "used_bytes": 95,
    "limit_bytes": 100,
    "budget_bytes": 120,
}
SESSION = {"session": 3, "name": "", "host": "node-a", "state": "live", "silent_s": 1.0}
CLAIM = {
    "session": 3,
    "client": "policy-0",
    "what": "claim",
    "partition": "train",
    "task": "policy",
    "fields": ["a", "b"],
    "wanted": 8,
    "ready": 2,
    "since": 60.0,
    "until": 200.0,
}
PUT = {**CLAIM, "what": "put", "client": "", "task": "", "wanted": 3 << 20, "ready": 1 << 10, "since": 99.0}


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """One for all: what is called here changes nothing in it."""
    with serve({"units": 0, "http_port": 0}) as server, visitor(browser, "modules") as visit:
        yield visit(server.http_address, viewport={"width": 800, "height": 600}).open()


def call(page: Page, module: str, function: str, *arguments: Any) -> Any:
    """What a function of a module says."""
    return page.evaluate(
        "async ([module, name, given]) => (await import(`/${module}.js`))[name](...given)",
        [module, function, list(arguments)],
    )


def test_figures_are_written_for_people(page: Page) -> None:
    wanted: dict[str, list[tuple[list[Any], str]]] = {
        "count": [([0], "0"), ([1234567], "1,234,567")],
        "brief": [([0], "0"), ([0.25], "0.25"), ([12.34], "12.3"), ([999], "999"), ([1500], "1.5k"), ([2e9], "2G")],
        "bytes": [
            ([0], "0 B"),
            ([1023], "1023 B"),
            ([1536], "1.5 KiB"),
            ([3 << 30], "3.0 GiB"),
            ([9 << 50], "9216.0 TiB"),
        ],
        "seconds": [
            ([-1], "0.0 ms"),
            ([0.0042], "4.2 ms"),
            ([0.042], "42 ms"),
            ([0.0999], "0.1 s"),
            ([9.99], "10 s"),
            ([59.7], "1 min"),
            ([61], "1 min 1 s"),
            ([3600], "1 h"),
            ([3 * 3600 + 60], "3 h 1 min"),
        ],
        "many": [([1, "sample"], "1 sample"), ([0, "sample"], "0 samples")],
        "percent": [
            *(([1, 0], "0%"), ([999, 1000], "99%"), ([1, 1000], "<1%"), ([1, 2], "50%"), ([7, 7], "100%")),
            ([118, 100], "100%"),
        ],
        "names": [([["a", "b"]], "a, b"), ([["a", "b", "c"], 1], "a and 2 more")],
        "host": [(["node-a"], "node-a"), (["12d91046-1c7c-4117-bb3a-ae722221928e"], "12d91046")],
        "clientName": [(["", 7], "session 7"), (["policy", 7], "policy")],
    }
    got = {name: [(given, call(page, "format", name, *given)) for given, _ in cases] for name, cases in wanted.items()}
    assert got == wanted


def test_axes_end_at_round_numbers(page: Page) -> None:
    cases = [
        (0, 10, 1),
        (0.3, 10, 0.4),
        (7, 10, 10),
        (41, 10, 50),
        (1001, 10, 2000),
        (0, 1024, 1024),
        (3 << 20, 1024, 4 << 20),
    ]
    got = [(most, base, call(page, "chart", "ceiling", most, base)) for most, base, _ in cases]
    assert [(most, base, pytest.approx(top)) for most, base, top in got] == cases


def test_moments_of_the_time_axis_are_few_and_round(page: Page) -> None:
    found = call(page, "spans", "ticks", 1000.3, 1060.2, 6)
    assert found == {"step": 10, "moments": [1010, 1020, 1030, 1040, 1050, 1060]}


def test_the_bytes_of_a_cell_are_all_accounted_for(page: Page) -> None:
    """An arena of 100 bytes in cells of 40, of which 60 are backed."""
    arena = {
        "cell_bytes": 40,
        "capacity_bytes": 100,
        "backed_bytes": 60,
        "live": [10, 5, 0],
        "reserved": [20, 0, 0],
        "retired": [0, 5, 0],
        "pinned": [10, 0, 0],
    }
    cells = [call(page, "memory", "partOf", arena, number) for number in range(3)]
    assert [(cell["from"], cell["to"], cell["free"], cell["unbacked"]) for cell in cells] == [
        (0, 40, 10, 0),
        (40, 80, 10, 20),
        (80, 100, 0, 20),
    ]


def test_what_was_slow_is_asked_for_again_later(page: Page) -> None:
    """An answer that takes nothing may be asked for again at once; one that takes two seconds not for another ten."""
    found = page.evaluate(
        """async () => {
          const { Pace } = await import("/pace.js");
          let now = 1000;
          performance.now = () => now;
          const pace = new Pace();
          const due = [pace.due];
          for (const took of [0, 2000]) {
            await pace.time(async () => { now += took; });
            due.push(pace.due);
          }
          now += 9000;
          due.push(pace.due);
          now += 1001;
          due.push(pace.due);
          delete performance.now; // what it has by itself is there again
          return due;
        }"""
    )
    assert found == [True, True, False, False, True]


def troubles(
    page: Page,
    waits: list[Any] = (),  # type: ignore[assignment]
    *,
    left_off: int = 0,
    **stats: Any,
) -> list[tuple[str, str]]:
    report = {"units": [UNIT], "partitions": [PARTITION], "sessions": [SESSION], **stats}
    listed = {"now": 100.0, "waits": list(waits), "total": len(waits) + left_off}
    found = call(page, "attention", "troubles", report, listed)
    return [(one["level"], one["text"]) for one in found]


def test_a_service_that_is_well_has_no_troubles(page: Page) -> None:
    assert troubles(page, [{**CLAIM, "since": 96.0}]) == []


def test_units_that_trouble(page: Page) -> None:
    assert troubles(page, units=[]) == [("bad", "No storage unit: puts cannot succeed. Start one with tq unit.")]
    unit = {**UNIT, "pressed": True, "problem": "no space in /dev/shm", "connected": False}
    assert troubles(page, units=[unit]) == [
        ("bad", "Storage unit 1 (unit-0) is not connected: its rows cannot be read."),
        ("bad", "Storage unit 1 (unit-0) cannot grow: no space in /dev/shm"),
        (
            "warn",
            "Storage unit 1 (unit-0) is filling up: 90% of the 10.0 MiB that new rows may use is used. "
            "Clear consumed samples.",
        ),
    ]


def test_partitions_and_clients_that_trouble(page: Page) -> None:
    partition = {**PARTITION, "pressed": True, "evicted_unconsumed": 1}
    assert troubles(page, partitions=[partition], sessions=[{**SESSION, "silent_s": 12.0}]) == [
        ("warn", "Partition train is near its budget: 95% of the space for new rows is used."),
        ("warn", "Partition train evicted 1 sample before consumption."),
        ("warn", "Client session 3 on host node-a has been silent for 12 s (live)."),
    ]


def test_waits_that_trouble_the_worst_first(page: Page) -> None:
    waits = [CLAIM, {**CLAIM, "client": "policy-1", "since": 70.0}, PUT, {**PUT, "since": 99.5}]
    assert troubles(page, waits) == [
        (
            "bad",
            "A put of session 3 has waited 1.0 s for space in train: it needs 3.0 MiB, 1.0 KiB are free. "
            "1 more put too.",
        ),
        (
            "warn",
            "Task policy of train: policy-0 has waited 40 s for 8 samples with a, b; 2 ready. 1 more claim too.",
        ),
    ]


def test_waits_that_are_not_listed_are_counted_in(page: Page) -> None:
    waits = [CLAIM, {**CLAIM, "client": "policy-1", "since": 70.0}, PUT, {**PUT, "since": 99.5}]
    found = [text.rpartition(". ")[2] for _, text in troubles(page, waits, left_off=7)]
    assert found == ["At least 1 more put too.", "At least 1 more claim too."]
