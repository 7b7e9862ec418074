"""What a service and its storage units keep in a state directory is not lost to a wrong flag of the next start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataplane import StateDirError, connect, serve
from dataplane.config import MIB
from dataplane.kept import discard

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
        with pytest.raises(StateDirError, match=f"Start it with --arena-dir {folder / 'arenas'}"):
            serve(wrong)
    with serve(right) as server, connect(server.address) as client:
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]
