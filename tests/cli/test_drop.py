"""`tq drop`."""

from __future__ import annotations

import json

import pytest

from dataplane import DataPlaneClient, DataPlaneConfig, connect, serve
from dataplane.cli import main
from dataplane.config import MIB
from dataplane.storage.unit import StorageUnit
from tests.cli.service import filled  # noqa: F401

pytestmark = pytest.mark.integration


def test_a_unit_without_rows_goes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"capacity_bytes": 8 * MIB, "units": 2}) as server, connect(server.address) as client:
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        first, second = client.stats().units
        assert main(["drop", first.name]) == 0
        assert capsys.readouterr().out == f"dropped storage unit {first.unit} {first.name}\n"
        assert main(["drop", str(second.unit), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {"unit": second.unit, "name": second.name, "live_bytes": 0}
        assert not client.stats().units


def test_rows_go_with_force_only(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", "unit-0"]) == 1
    assert "values of 3 live samples" in capsys.readouterr().err
    assert main(["drop", "unit-0", "--force"]) == 0
    assert "of live rows with it" in capsys.readouterr().out
    assert not filled.stats().units
    assert filled.list_samples("train").size == 0


def test_no_such_unit_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", "zz"]) == 1
    assert capsys.readouterr().err == "tq: storage unit 'zz': not found; the service has 1 unit-0\n"


def test_a_name_that_two_have_is_not_enough(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    with StorageUnit(DataPlaneConfig(capacity_bytes=8 * MIB), str(filled.config.address), name="unit-0"):
        assert main(["drop", "unit-0"]) == 1
        assert (
            "several units have this name, pass a number; the service has 1 unit-0, 2 unit-0" in capsys.readouterr().err
        )
