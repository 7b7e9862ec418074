"""A storage unit as an object: started, stopped, and started again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dataplane import connect
from tests.lives import one_unit

pytestmark = pytest.mark.integration


def test_a_unit_that_was_started_is_not_started_twice(tmp_path: Path) -> None:
    with one_unit(tmp_path / "state") as lives:
        unit, before = lives.units[0], set(threading.enumerate())
        with unit.start() as same:
            assert same is unit
            assert {thread.name for thread in set(threading.enumerate()) - before} == set()
            with connect(lives.address) as client:
                assert [found.unit for found in client.stats().units] == [1]
        assert not {thread.name for thread in threading.enumerate() if thread.name in ("tq-bulk", "tq-unit-link")}
        unit.stop()
        unit.start()
        with connect(lives.address) as client:
            assert [found.connected for found in client.stats().units] == [False, True]
