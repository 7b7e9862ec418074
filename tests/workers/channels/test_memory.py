"""The memory of a channel's broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.errors import ArenaSpaceError
from workers.channels import broker as module
from workers.channels.broker import ChannelMemory

MIB = 1 << 20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ChannelMemory:
    monkeypatch.setattr(module, "GROW_BYTES", MIB)
    return ChannelMemory(8 * MIB)


def test_it_has_no_name(memory: ChannelMemory) -> None:
    target = Path(f"/proc/self/fd/{memory.fd}").readlink()
    assert str(target).endswith(" (deleted)")
    memory.close()
    memory.close()
    assert memory.fd == -1


def test_pieces_do_not_overlap_and_all_of_it_can_be_had(memory: ChannelMemory) -> None:
    offsets = [memory.take(MIB) for _ in range(8)]
    assert sorted(offset for offset in offsets if offset is not None) == [n * MIB for n in range(8)]
    assert memory.take(1) is None
    assert memory.used_bytes == memory.capacity_bytes == 8 * MIB
    memory.give(3 * MIB, MIB)
    assert memory.take(2 * MIB) is None
    assert memory.take(MIB) == 3 * MIB
    memory.close()


def test_memory_that_is_not_there_is_an_error_or_no_space(
    memory: ChannelMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ArenaSpaceError):
        ChannelMemory(1 << 60)

    def refuse(_: int) -> int:
        raise ArenaSpaceError(directory="/dev/shm", found_bytes=0, wanted_bytes=1)

    monkeypatch.setattr(memory._arena, "grow", refuse)
    assert memory.take(MIB) is None
    assert "cannot grow beyond" in caplog.text
    memory.close()
