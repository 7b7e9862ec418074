"""`tq drain`."""

from __future__ import annotations

import json

import pytest

from dataplane import DataPlaneClient, DataPlaneConfig
from dataplane.cli import main
from dataplane.config import MIB
from dataplane.unit import StorageUnit
from tests.cli_service import filled  # noqa: F401

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
    assert "unit 1" in capsys.readouterr().err
    assert filled.stats().units[0].draining
    assert main(["drain", "unit-0", "--undo"]) == 0
    assert capsys.readouterr().out == "storage unit 1 unit-0 takes new rows again\n"
    assert not filled.stats().units[0].draining


def test_what_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "unit-0", "--undo", "--drop", "--address", "127.0.0.1:1"]) == 2
    assert "it cannot both stay and go" in capsys.readouterr().err


def test_no_such_unit_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "zz"]) == 1
    assert "storage unit 'zz': there is none such" in capsys.readouterr().err
