"""Whether new arenas fit into the memory of a host, beside those of the units that run there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane import DataPlaneConfig, serve
from dataplane.config import MIB
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.errors import ArenaSpaceError
from dataplane.storage import arena as arena_module
from dataplane.storage import capacity as capacity_module
from dataplane.storage.arena import Arena, new_arena_name
from dataplane.storage.arena_record import UnitRecord
from dataplane.storage.capacity import arena_capacity, growing_arenas, unit_configs, unit_name

Free = Callable[[int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Sets how many bytes are available."""

    def set_free(free_bytes: int) -> None:
        memory = AvailableMemory(free_bytes=free_bytes, limit="a test's limit")
        for module in (arena_module, capacity_module):
            monkeypatch.setattr(module, "available_memory", lambda directory: memory)

    return set_free


def test_arenas_grow_by_the_capacity_that_is_not_backed(tmp_path: Path) -> None:
    folder = own_directory(tmp_path)
    with (
        Arena.create(folder, 4 * MIB, epoch=1) as part,
        Arena.create(folder, MIB, epoch=1) as full,
        Arena.create(folder, 2 * MIB, epoch=1, keeper=tmp_path / "keeper") as recorded,
    ):
        part.grow(MIB)
        full.grow(MIB)
        assert growing_arenas(tmp_path) == {str(part.path): 3 * MIB, str(recorded.path): 2 * MIB}
    assert growing_arenas(tmp_path) == {}


def test_an_arena_without_a_process_does_not_grow_unless_it_is_adopted(tmp_path: Path) -> None:
    arena = Arena.create(own_directory(tmp_path), 4 * MIB, epoch=1, keeper=tmp_path)
    arena.close(unlink=False)
    assert growing_arenas(tmp_path) == {}
    assert growing_arenas(tmp_path, [arena.path]) == {str(arena.path): 4 * MIB}


def test_files_that_are_no_readable_arenas_are_skipped(tmp_path: Path) -> None:
    other = tmp_path / "tq-12345"
    other.mkdir()
    for content in (b"", b"\xff" * 100):
        (other / new_arena_name()).write_bytes(content)
    (other / new_arena_name()).symlink_to(tmp_path / "none")
    (tmp_path / "tq-54321").write_text("a file instead of a directory")
    with Arena.create(other, MIB, epoch=1) as arena:
        assert growing_arenas(tmp_path) == {str(arena.path): MIB}


def test_the_sum_of_all_units_has_to_fit(tmp_path: Path, free: Free) -> None:
    config = DataPlaneConfig(capacity_bytes=12 * MIB, arena_dir=str(tmp_path))
    free(16 * MIB)
    assert [each.capacity_bytes for each in unit_configs(config, 1)] == [12 * MIB]
    with pytest.raises(ArenaSpaceError) as caught:
        unit_configs(config, 3)
    assert str(caught.value) == (
        f"the arenas of 3 storage units need {36 * MIB:,} bytes in {tmp_path}, which has {16 * MIB:,} free (a test's "
        "limit). Set a smaller --capacity, fewer --units or another --arena-dir, or increase the container's shared "
        "memory (docker --shm-size)."
    )


def test_what_other_services_may_still_take_is_not_free(tmp_path: Path, free: Free) -> None:
    free(16 * MIB)
    with Arena.create(own_directory(tmp_path), 12 * MIB, epoch=1) as other:
        other.grow(2 * MIB)
        assert arena_capacity(tmp_path, 6 * MIB) == 6 * MIB
        with pytest.raises(ArenaSpaceError) as caught:
            arena_capacity(tmp_path, 7 * MIB)
        assert (caught.value.wanted_bytes, caught.value.growing_bytes) == (7 * MIB, 10 * MIB)
        assert f"running storage units may still take {10 * MIB:,} (largest: {other.path})" in str(caught.value)
        assert "stop services that run there" in str(caught.value)


def test_default_capacities_fit_together_and_beside_others(
    tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "SHARE_OF_FILE_SYSTEM", 1.0)
    free(48 * MIB)
    config = DataPlaneConfig(arena_dir=str(tmp_path))
    assert [each.capacity_bytes for each in unit_configs(config, 3)] == [8 * MIB] * 3
    with Arena.create(own_directory(tmp_path), 36 * MIB, epoch=1):
        assert [each.capacity_bytes for each in unit_configs(config, 3)] == [2 * MIB] * 3


def test_leftovers_of_killed_units_are_removed_first(tmp_path: Path, free: Free) -> None:
    (own_directory(tmp_path) / new_arena_name()).write_bytes(b"")
    free(MIB)
    unit_configs(DataPlaneConfig(capacity_bytes=MIB, arena_dir=str(tmp_path)), 1)
    assert os.listdir(own_directory(tmp_path)) == []


def test_units_that_adopt_their_arenas_need_only_what_these_may_still_grow(tmp_path: Path, free: Free) -> None:
    config = DataPlaneConfig(capacity_bytes=8 * MIB, arena_dir=str(tmp_path), state_dir=str(tmp_path / "state"))
    record = UnitRecord(tmp_path / "state", unit_name(0), tmp_path, tmp_path)
    folder = own_directory(tmp_path)
    arena = record.create_arena(lambda keeper: Arena.create(folder, 16 * MIB, epoch=1, keeper=keeper))
    arena.grow(10 * MIB)
    record.write(arena, 1)
    arena.close(unlink=False)
    free(14 * MIB)
    assert unit_configs(config, 2) == [config.of_unit(0), config.of_unit(1)]
    free(14 * MIB - 1)
    with pytest.raises(ArenaSpaceError) as caught:
        unit_configs(config, 2)
    assert (caught.value.wanted_bytes, caught.value.growing_bytes) == (8 * MIB, 6 * MIB)
    free(0)
    assert unit_configs(config, 1) == [config.of_unit(0)], "a restart takes no new memory"


@pytest.mark.integration
def test_an_embedded_service_starts_no_unit_without_space_for_all(tmp_path: Path, free: Free) -> None:
    free(16 * MIB)
    with pytest.raises(ArenaSpaceError, match="the arenas of 3 storage units need"):
        serve({"units": 3, "capacity_bytes": 6 * MIB, "arena_dir": str(tmp_path)})
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.integration
def test_a_further_unit_counts_the_units_that_run(tmp_path: Path, free: Free) -> None:
    settings = {"capacity_bytes": 70 * MIB, "arena_dir": str(tmp_path)}
    free(75 * MIB)
    with serve(settings), pytest.raises(ArenaSpaceError) as caught:  # 64 MiB of the first are backed
        serve(settings)
    assert caught.value.growing_bytes == 6 * MIB
