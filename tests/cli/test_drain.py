"""`tq drain`."""

from __future__ import annotations

import contextlib
import json
import signal

import pytest

from dataplane import DataPlaneClient, DataPlaneConfig
from dataplane.cli import changes, main
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import MIB
from dataplane.ledger import commands as c
from dataplane.storage.unit import StorageUnit
from tests.children import Child
from tests.cli.service import TQ, filled  # noqa: F401
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

OTHER = DataPlaneConfig(capacity_bytes=8 * MIB)


def test_rows_move_and_the_unit_goes(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0"]) == 0
        assert capsys.readouterr().out.startswith("storage unit 1 unit-0 is empty: 7 cells moved (")
        assert main(["status"]) == 0
        assert "DRAINING" in capsys.readouterr().out
        assert main(["drain", "1", "--drop", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["name"], told["cells"], told["dropped"]) == ("unit-0", 0, True)
        assert [unit.name for unit in filled.stats().units] == ["other"]
        rows = filled.get_samples(["a", "b", "c"], "train", ["ids"])["ids"].unbind()
        assert [len(row) for row in rows] == [5, 2, 9]


def test_a_drain_that_cannot_be_is_exit_1_and_can_be_undone(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "unit-0", "--timeout", "0.1"]) == 1
    told = capsys.readouterr().err
    assert "unit 1 is not drained: no other storage unit has space for new rows" in told
    assert "force the drain (--force)" in told
    assert not filled.stats().units[0].draining
    assert main(["drain", "unit-0", "--timeout", "0.1", "--force"]) == 1
    told = capsys.readouterr().err
    assert "unit 1" in told
    assert "(--undo)" in told
    assert filled.stats().units[0].draining
    assert main(["drain", "unit-0", "--undo"]) == 0
    assert capsys.readouterr().out == "storage unit 1 unit-0 takes new rows again\n"
    assert not filled.stats().units[0].draining


def test_it_is_said_how_far_it_is(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_ELSEWHERE_S", 0.0)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0"]) == 0
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith("storage unit 1 unit-0: ")
        assert first.endswith(" left")
        assert last.startswith("storage unit 1 unit-0: 7 cells moved (")
        assert last.endswith(", 0 left")


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_undoes_it(
    before: bool, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: object, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changes._ProgressLine, "show", interrupt)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        if before:
            with contextlib.closing(ControllerChannel.open(filled.config)) as channel:
                channel.call(c.Drain(unit=1))
        assert main(["drain", "unit-0", "--drop"]) == 1
        told = capsys.readouterr().err
        assert "interrupted: storage unit 1 unit-0 " in told
        assert ("gets no new rows, as before" in told) is before
        assert [unit.draining for unit in filled.stats().units] == [before, False]
        rows = filled.get_samples(["a", "b", "c"], "train", ["ids"])["ids"].unbind()
        assert [len(row) for row in rows] == [5, 2, 9]


def test_an_interrupt_before_it_is_dropped_does_not_say_that_nothing_was_done(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(client: object, unit: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DataPlaneClient, "drop_unit", interrupt)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0", "--drop"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            "tq: interrupted: storage unit 1 unit-0 is empty and gets no new rows; "
            "it may or may not have been dropped (check `tq status`, run `tq drop`)"
        )


def test_ctrl_c_ends_a_drain_that_waits_for_space(filled: DataPlaneClient) -> None:
    with Child([*TQ, "drain", "unit-0", "--force"]) as process:
        wait_until(lambda: filled.stats().units[0].draining)
        process.send_signal(signal.SIGINT)
        code, output, errors = process.finish()
    assert (code, output) == (1, "")
    assert "tq: interrupted: storage unit 1 unit-0 takes new rows again" in errors
    assert "Traceback" not in errors
    assert not filled.stats().units[0].draining


def test_what_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "unit-0", "--undo", "--drop", "--address", "127.0.0.1:1"]) == 2
    assert "the flags exclude each other" in capsys.readouterr().err


def test_no_such_unit_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "zz"]) == 1
    assert "storage unit 'zz': not found" in capsys.readouterr().err
