"""A storage unit as an object: started, stopped, and started again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dataplane import connect
from dataplane.config import DataPlaneConfig
from dataplane.storage.unit import StorageUnit
from tests.restarts import one_unit, wait_until

pytestmark = pytest.mark.integration


def of_units() -> set[threading.Thread]:
    """Threads of storage units in this process."""
    return {thread for thread in threading.enumerate() if thread.name in ("tq-bulk", "tq-unit-link")}


def test_a_unit_that_was_started_is_not_started_twice(tmp_path: Path) -> None:
    others = of_units()  # of services that other tests share
    with one_unit(tmp_path / "state") as restartable:
        unit, before = restartable.units[0], of_units() - others
        assert {"tq-bulk", "tq-unit-link"} <= {thread.name for thread in before}
        with unit.start() as same:
            assert same is unit
            assert not of_units() - before - others
            with connect(restartable.address) as client:
                assert [found.unit for found in client.stats().units] == [1]
        wait_until(lambda: not before & of_units(), "the end of its threads")
        unit.stop()
        unit.start()
        with connect(restartable.address) as client:
            wait_until(lambda: [found.connected for found in client.stats().units] == [False, True], "the first's end")


def test_a_start_beside_give_up_finds_that_it_was_given_up_or_has_its_link_closed() -> None:
    """`start` sets its link and then looks whether it was given up; `give_up` does the reverse."""
    seen: list[bool] = []

    class Observed(StorageUnit):
        @property
        def _link(self) -> None:
            seen.append(self._given_up)

        @_link.setter
        def _link(self, link: object) -> None:
            pass

    Observed(DataPlaneConfig(), "127.0.0.1:1").give_up()
    assert seen == [True]
