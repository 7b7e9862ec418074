"""What a service and its storage units keep in a state directory is not lost to a wrong flag of the next start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataplane import DataPlaneConfig, StateDirError, connect, serve
from dataplane.config import MIB
from dataplane.storage.arena_record import discard
from dataplane.storage.unit import StorageUnit
from tests.ports import free_ports

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Directories for the state and for arenas."""
    for name in ("arenas", "others"):
        (tmp_path / name).mkdir()
    yield tmp_path
    discard(tmp_path / "state", [tmp_path / "arenas", tmp_path / "others"])


def test_rows_outlive_a_start_with_another_arena_directory(folder: Path) -> None:
    right = {"capacity_bytes": MIB, "state_dir": str(folder / "state"), "arena_dir": str(folder / "arenas")}
    with serve(right) as server, connect(server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    for wrong in (right | {"arena_dir": str(folder / "others")}, right | {"arena_dir": "/dev/shm"}):
        with pytest.raises(StateDirError, match=f"Start the unit with --arena-dir {folder / 'arenas'}"):
            serve(wrong)
    with serve(right) as server, connect(server.address) as client:
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]


def unit_of(address: str, folder: Path) -> StorageUnit:
    config = DataPlaneConfig(capacity_bytes=MIB, state_dir=str(folder / "state"), arena_dir=str(folder / "arenas"))
    return StorageUnit(config, address, name="e")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "state").glob("unit-*")}


@pytest.mark.parametrize("durable", [True, False])
def test_rows_outlive_a_start_of_their_unit_for_another_service(folder: Path, *, durable: bool) -> None:
    with serve({"units": 0} | ({"state_dir": str(folder / "service")} if durable else {})) as own:
        with unit_of(own.address, folder), connect(own.address) as client:
            client.register_partition("p", ["x"], None, ["train"])
            client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        written = contents(folder)
        with serve({"units": 0}) as other:
            why = f" at {own.address}; this unit was started for .+ at {other.address}. Start the unit with the address"
            with pytest.raises(StateDirError, match=why):
                unit_of(other.address, folder).start()
        assert contents(folder) == written
        with unit_of(own.address, folder), connect(own.address) as client:
            assert [unit.name for unit in client.stats().units] == ["e"]
            assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]


def test_a_service_that_moved_is_the_same(folder: Path) -> None:
    first = free_ports(4)
    for port in (first, first + 2):
        settings = {"units": 0, "port": port, "state_dir": str(folder / "service")}
        with serve(settings) as server, unit_of(server.address, folder) as unit:
            assert unit.number == 1


def test_a_unit_of_a_service_that_began_anew_at_its_address_begins_anew_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(2)
    with (
        serve({"units": 0, "port": port}) as server,
        unit_of(server.address, folder),
        connect(server.address) as client,
    ):
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["a"], "p", {"x": torch.arange(1)})
    written = contents(folder)
    with (
        serve({"units": 0, "port": port}) as server,
        unit_of(server.address, folder),
        connect(server.address) as client,
    ):
        assert [unit.live_bytes for unit in client.stats().units] == [0]
    assert "It had no state directory, or the directory was emptied" in caplog.text
    assert contents(folder) != written


@pytest.mark.parametrize("name", [None, ""])
def test_a_unit_without_a_name_is_refused_where_its_rows_are_to_outlive_it(tmp_path: Path, name: str | None) -> None:
    config = DataPlaneConfig(capacity_bytes=MIB, state_dir=str(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"needs a name.*tq unit --name"):
        StorageUnit(config, "127.0.0.1:1", name=name)
