""""""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataplane import DataPlaneConfig, serve
from dataplane.config import MIB
from dataplane.core.file_locks import new_arena_name
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.errors import ArenaSpaceError, ClientClosedError
from dataplane.ledger.commands import GrowArena, Grown
from dataplane.storage import arena as arena_module
from dataplane.storage import capacity as capacity_module
from dataplane.storage.arena import HEADER_BYTES, PAGE_BYTES, Arena, default_capacity, new_arena_name, sweep
from dataplane.storage.arena_record import UnitRecord
from dataplane.storage.capacity import arena_capacity, growing_arenas, unit_configs, unit_name
from dataplane.storage.mapped_arena import MappedArena
from tests.storage.unit_under_test import UNIT, Peer, Unit, refused, write

SHM = Path("/dev/shm")


@pytest.fixture
def arena():
    with Arena.create(SHM, 4 * MIB, epoch=1) as made:
        yield made


def set_available(monkeypatch, free_bytes):
    monkeypatch.setattr(
        arena_module,
        "available_memory",
        lambda directory: AvailableMemory(free_bytes=free_bytes, limit="a test's limit"),
    )


def file_blocks_bytes(path):
    return os.stat(path).st_blocks * 512


def test_file_is_private_and_named_at_random(arena):
    info = os.stat(arena.path)
    assert re.fullmatch(r"tq-arena-[0-9a-f]{32}", arena.path.name)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == HEADER_BYTES + 4 * MIB


def test_memory_is_taken_only_as_it_grows(arena):
    before = file_blocks_bytes(arena.path)
    assert arena.backed_bytes == 0
    assert arena.grow(MIB + 1) == MIB + PAGE_BYTES
    assert file_blocks_bytes(arena.path) - before == MIB + PAGE_BYTES
    assert arena.grow(MIB) == MIB + PAGE_BYTES, "growing never shrinks"
    assert arena.grow(1 << 40) == arena.capacity_bytes


def test_growing_pauses_between_steps(arena, monkeypatch):
    monkeypatch.setattr(arena_module, "GROW_STEP_BYTES", MIB)
    assert list(arena.grow_steps(3 * MIB + 1)) == [MIB, 2 * MIB, 3 * MIB, 3 * MIB + PAGE_BYTES]


def test_capacity_is_whole_pages():
    with Arena.create(SHM, 2 * PAGE_BYTES + 5, epoch=1) as small, Arena.create(SHM, 1, epoch=1) as smallest:
        assert (small.capacity_bytes, smallest.capacity_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)


def test_too_little_space_at_start_names_sizes_and_ways_out(monkeypatch, tmp_path):
    set_available(monkeypatch, 64 * MIB)
    with pytest.raises(ArenaSpaceError, match=r"--capacity.*--arena-dir.*shm-size") as caught:
        Arena.create(tmp_path, 512 * MIB, epoch=1)
    assert caught.value.found_bytes == 64 * MIB
    assert caught.value.wanted_bytes == 512 * MIB + HEADER_BYTES
    assert not list(tmp_path.iterdir())


def test_failed_growth_keeps_what_there_is(arena, monkeypatch):
    arena.grow(MIB)
    set_available(monkeypatch, MIB // 2)
    with pytest.raises(ArenaSpaceError) as caught:
        arena.grow(2 * MIB)
    assert (caught.value.found_bytes, caught.value.wanted_bytes) == (MIB // 2, MIB)
    assert arena.backed_bytes == MIB
    arena.data[:MIB] = 7


def test_growth_takes_the_steps_that_there_is_space_for(arena, monkeypatch):
    monkeypatch.setattr(arena_module, "GROW_STEP_BYTES", MIB)
    whole = 5 * MIB // 2

    def left(directory):
        return AvailableMemory(free_bytes=whole - arena.backed_bytes, limit="a test's limit")

    monkeypatch.setattr(arena_module, "available_memory", left)
    with pytest.raises(ArenaSpaceError) as caught:
        arena.grow(4 * MIB)
    assert (caught.value.found_bytes, caught.value.wanted_bytes) == (MIB // 2, MIB)
    assert arena.backed_bytes == 2 * MIB


def test_a_refusal_of_the_kernel_is_told_the_same_way(arena, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaSpaceError, match="No space left"):
        arena.grow(MIB)
    assert arena.backed_bytes == 0


@pytest.mark.integration
def test_full_tmpfs_is_an_error_and_no_signal(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this process may not mount a tmpfs")
    try:
        with Arena.create(tmp_path, 6 * MIB, epoch=1) as arena:
            arena.grow(2 * MIB)
            (tmp_path / "someone-else").write_bytes(bytes(4 * MIB))
            with pytest.raises(ArenaSpaceError) as caught:
                arena.grow(6 * MIB)
            assert caught.value.found_bytes < 2 * MIB
            arena.data[: 2 * MIB] = 1
            (tmp_path / "someone-else").unlink()
            assert arena.grow(6 * MIB) == 6 * MIB
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_both_mappings_see_the_units_bytes(arena):
    arena.grow(MIB)
    with MappedArena.open(arena.path, cookie=arena.cookie) as mapped:
        mapped.writable(100, 4)[:] = [1, 2, 3, 4]
        assert arena.data[100:104].tolist() == [1, 2, 3, 4]
        assert mapped.readonly(100, 4).tolist() == [1, 2, 3, 4]
        assert not mapped.readonly(100, 4).flags.writeable


def test_offsets_outside_are_refused(arena):
    with MappedArena.open(arena.path) as mapped:
        for offset, nbytes in [(-1, 1), (0, -1), (arena.capacity_bytes, 1), (0, arena.capacity_bytes + 1)]:
            with pytest.raises(ValueError, match="outside the arena"):
                mapped.readonly(offset, nbytes)
        with pytest.raises(ValueError, match="outside the header"):
            mapped.header(HEADER_BYTES, 1)


def test_arrays_outlive_the_mapping_and_the_arena():
    with Arena.create(SHM, MIB, epoch=1) as arena:
        arena.grow(MIB)
        mapped = MappedArena.open(arena.path)
        mapped.writable(0, 3)[:] = 9
        view = mapped.readonly(0, 3)
        mapped.close()
        mapped.close()
        assert mapped.closed
        for use in (mapped.writable, mapped.readonly, mapped.header):
            with pytest.raises(ClientClosedError):
                use(0, 1)
    assert view.tolist() == [9, 9, 9]


def test_closing_unmaps_when_the_last_array_goes(arena):
    def mappings():
        return Path("/proc/self/maps").read_text().count(arena.path.name)

    before = mappings()
    mapped = MappedArena.open(arena.path)
    view = mapped.readonly(0, 1)
    assert mappings() == before + 2
    mapped.close()
    assert mappings() == before + 1
    del view
    assert mappings() == before


def test_another_arena_or_another_file_is_not_mapped(arena, tmp_path):
    with pytest.raises(ValueError, match="another arena"):
        MappedArena.open(arena.path, cookie=bytes(16))
    stranger = tmp_path / "x"
    stranger.write_bytes(bytes(HEADER_BYTES))
    with pytest.raises(ValueError, match="not an arena"):
        MappedArena.open(stranger)
    stranger.write_bytes(arena.path.read_bytes()[: HEADER_BYTES + 10])
    with pytest.raises(ValueError, match="truncated"):
        MappedArena.open(stranger)
    with pytest.raises(FileNotFoundError):
        MappedArena.open(tmp_path / "missing")


def test_challenges_are_fresh_and_readable_through_the_mapping(arena):
    with MappedArena.open(arena.path, writable=False) as mapped:
        made = [arena.challenge() for _ in range(20)]
        assert len({each.secret for each in made}) == len({each.offset for each in made}) == 20
        assert all(mapped.header(each.offset, len(each.secret)) == each.secret for each in made)
        assert mapped.header(0, 8) == b"TQARENA\0", "challenges leave the identity alone"


def test_close_removes_the_file_and_is_idempotent():
    arena = Arena.create(SHM, MIB, epoch=1)
    arena.close()
    arena.close()
    assert not arena.path.exists()


@pytest.mark.integration
def test_a_forked_child_that_closes_leaves_the_file(arena):
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert arena.path.exists()


def test_sweep_takes_what_nobody_holds_and_nothing_else(tmp_path, arena):
    dead = tmp_path / new_arena_name()
    dead.write_bytes(b"")
    aside = tmp_path / f".{new_arena_name()}.abcd"
    aside.write_bytes(b"")
    other = tmp_path / "tq-arena-mine"
    other.write_bytes(b"")
    link = tmp_path / new_arena_name()
    link.symlink_to(other)
    with Arena.create(tmp_path, MIB, epoch=1) as held:
        assert sweep(tmp_path) == [dead]
        assert held.path.exists()
    assert all(each.exists() for each in (aside, other, link))


@pytest.mark.integration
def test_an_arena_of_a_killed_unit_is_swept(tmp_path):
    code = (
        "import os, signal, sys; from dataplane.storage.arena import Arena;"
        "print(Arena.create(sys.argv[1], 1 << 20, epoch=1).path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    path = Path(killed.stdout.strip())
    assert path.exists()
    assert sweep(tmp_path) == [path]
    assert not path.exists()


def test_default_capacity_leaves_space(monkeypatch):
    stat = SimpleNamespace(f_blocks=1000 * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: stat)
    set_available(monkeypatch, 1000 * MIB)
    assert default_capacity(SHM) == 300 * MIB
    set_available(monkeypatch, 100 * MIB)
    assert default_capacity(SHM) == 50 * MIB
    set_available(monkeypatch, 0)
    assert default_capacity(SHM) == MIB


@pytest.mark.integration
def test_arena_and_bulk_need_no_torch():
    code = (
        "import sys, dataplane.storage.arena, dataplane.storage.client, dataplane.storage.server; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_data_is_plain_bytes(arena):
    arena.grow(MIB)
    assert arena.data.dtype == np.uint8
    assert arena.data.shape == (arena.capacity_bytes,)
    assert not arena.data[:MIB].any()


# --- A storage unit's arena grows when it is told to, while requests are served.


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture
def peer(unit):
    with Peer(unit) as made:
        yield made


@pytest.mark.integration
def test_growing_is_reported(unit, peer):
    assert "outside" in str(refused(peer.ask(b"x", write=write((20 * MIB, 1)))))
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    grown = unit.expect(Grown)
    assert (grown.unit, grown.backed_bytes, grown.error) == (UNIT, 24 * MIB, None)
    assert peer.ask(b"x", write=write((20 * MIB, 1)))[0].written.size == 1
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=MIB))
    assert unit.expect(Grown).backed_bytes == 24 * MIB


@pytest.mark.integration
def test_growing_that_fails_says_why(unit, peer, monkeypatch):
    def full(*_):
        raise ArenaSpaceError(directory="/dev/shm", found_bytes=5, wanted_bytes=9)
        yield

    monkeypatch.setattr(unit.arena, "grow_steps", full)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    grown = unit.expect(Grown)
    assert grown.backed_bytes == 16 * MIB
    assert "--capacity" in str(grown.error)


@pytest.mark.integration
def test_growing_that_breaks_is_reported_too(unit, monkeypatch, caplog):
    def broken(*_):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(unit.arena, "grow_steps", broken)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    assert "Input/output" in str(unit.expect(Grown).error)
    assert unit.server.alive


FULL = ArenaSpaceError(directory="/x", found_bytes=5, wanted_bytes=9)


@pytest.mark.integration
@pytest.mark.parametrize("error", [FULL, OSError(5, "broken")])
def test_growing_that_goes_on_failing_is_logged_once(unit, monkeypatch, caplog, error):
    def fails(*_):
        raise error
        yield

    def grow(patched):
        unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
        assert bool(unit.expect(Grown).error) == patched
        return sum("cannot grow" in each for each in caplog.messages)

    with monkeypatch.context() as broken:
        broken.setattr(unit.arena, "grow_steps", fails)
        assert [grow(True) for _ in range(3)] == [1, 1, 1]
    assert grow(False) == 1
    monkeypatch.setattr(unit.arena, "grow_steps", fails)
    assert grow(True) == 2


@pytest.mark.integration
def test_requests_are_served_between_the_steps_of_growing(unit, peer, monkeypatch):
    served = threading.Event()

    def steps(_):
        while not served.is_set():
            yield 0

    monkeypatch.setattr(unit.arena, "grow_steps", steps)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1
    assert unit.reports.empty()
    served.set()
    unit.expect(Grown)


# --- Whether new arenas fit into the memory of a host, beside those of the units that run there.


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
