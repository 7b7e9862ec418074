"""Arenas whose directory has no space, or takes no writes: puts are told so, and everything else goes on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, connect, serve
from dataplane.config import MIB
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.errors import ArenaSpaceError, CapacityTimeoutError

pytestmark = pytest.mark.integration

CAPACITY = 100 * MIB
SERVICE = {"capacity_bytes": CAPACITY}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 MiB of its own."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this process may not mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)  # somebody may hold a view of an arena there still


def row(nbytes: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {f"x{nbytes}": torch.full((1, nbytes), value, dtype=torch.uint8)}


def works(client: DataPlaneClient, name: str) -> None:
    """What there is space for is stored and read."""
    client.put_samples([name], "p", row(MIB, 7))
    assert client.get_samples([name], "p", [f"x{MIB}"])[f"x{MIB}"].sum() == 7 * MIB
    client.clear_samples([name], "p")


def test_a_full_disk_is_named_and_there_is_space_again_when_there_is(small_disk: Path) -> None:
    with serve({**SERVICE, "arena_dir": str(small_disk)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")
        filler = small_disk / "filler"
        filler.write_bytes(bytes(40 * MIB))
        with pytest.raises(CapacityTimeoutError, match=r"cannot grow: the arena needs .* bytes in") as caught:
            client.put_samples(["large"], "p", row(80 * MIB))
        assert str(small_disk) in str(caught.value)
        works(client, "small")
        assert f"in {small_disk}" in client.stats().units[0].problem
        filler.unlink()
        client.register_partition("p", [], None, ["t"])
        client.put_samples(["large"], "p", row(80 * MIB))
        assert client.stats().units[0].problem == ""


def test_a_put_waits_for_space_on_the_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filler goes when the arena has been refused space twice, so that the put is served by a later try."""
    refused: list[int] = []
    filler = small_disk / "filler"
    honest = os.posix_fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if filler.exists():
            refused.append(nbytes)
            if len(refused) == 2:
                filler.unlink()
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(fd, offset, nbytes)

    with serve({**SERVICE, "arena_dir": str(small_disk)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"])
        filler.touch()
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        client.put_samples(["large"], "p", row(80 * MIB))
        assert len(refused) == 2
        assert not filler.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_whatever_the_disk_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with serve({**SERVICE, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")
        with monkeypatch.context() as broken:
            broken.setattr(os, "posix_fallocate", fail)
            with pytest.raises(CapacityTimeoutError) as caught:
                client.put_samples(["large"], "p", row(80 * MIB))
            assert os.strerror(number) in str(caught.value)
            assert str(tmp_path) in str(caught.value)
            works(client, "small")


def test_a_memory_limit_that_others_use_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    with serve({**SERVICE, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")

        def little(directory: Any) -> AvailableMemory:
            return AvailableMemory(free_bytes=5, limit="the cgroup's memory limit of 9 bytes")

        monkeypatch.setattr("dataplane.storage.arena.available_memory", little)
        with pytest.raises(CapacityTimeoutError, match=r"5 free .the cgroup's memory limit of 9 bytes"):
            client.put_samples(["large"], "p", row(80 * MIB))
        works(client, "small")


def test_a_disk_that_takes_no_writes_is_named_at_the_start(small_disk: Path) -> None:
    folder = own_directory(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ArenaSpaceError, match=r"Read-only file system") as caught:
        serve({**SERVICE, "arena_dir": str(small_disk)})
    assert caught.value.directory == str(folder)
