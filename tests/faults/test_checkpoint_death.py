"""`kill -9` of who saves or restores, anywhere: an older checkpoint stays whole, nothing stays pinned, staged or half
restored."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, serve
from dataplane.client.checkpoint import manifest
from tests.faults.dying import SESSION_TIMEOUT_S, Dying, give_up

pytestmark = pytest.mark.slow

MIB = 1 << 20
IDS = [f"s{number}" for number in range(5)]
Kill = Callable[..., None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = {"capacity_bytes": 32 * MIB, "heartbeat_s": 0.2, "session_timeout_s": SESSION_TIMEOUT_S}
    with serve(settings) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address, heartbeat_s=0.2) as opened:
        opened.register_partition("p", {"x": None}, None, ["train"])
        opened.put_samples(IDS, "p", {"x": torch.zeros(5, MIB, dtype=torch.uint8)})
        yield opened
        for partition in opened.stats().partitions:
            opened.clear_samples(None, partition.partition)


@pytest.fixture(scope="module")
def kill(server: Server) -> Iterator[Kill]:
    """Runs a client that does its job until it kills itself at a failpoint."""

    def run(job: str, at: str, path: Path, connection_kind: str) -> None:
        settings = {
            "how": "kill",
            "partition": "p",
            "at": at,
            "job": job,
            "path": str(path),
            "connection_kind": connection_kind,
        }
        with contextlib.closing(Dying(server.address, settings)) as dying:
            assert dying.said() == "there"
            assert dying.ended() == -signal.SIGKILL
        give_up(server)

    yield run
    # The locks of victims that no unit came to know are swept when a unit starts.
    serve({"capacity_bytes": MIB}).close()


def whole(path: Path) -> manifest.Manifest:
    """The manifest of the checkpoint that a restore of the path reads; all that it names is as it was written."""
    directory = manifest.current(path)
    found = manifest.read(directory)
    for file in found.files:
        manifest.verify(directory, file)
    return found


def soon(client: DataPlaneClient, done: Callable[[Any], bool]) -> None:
    for _ in range(3000):
        stats = client.stats()
        if done(stats):
            return
        time.sleep(0.02)
    pytest.fail(f"still so after a minute: {stats}")


@pytest.mark.parametrize("connection_kind", ["local", "remote"])
@pytest.mark.parametrize("at", ["saved", "file_written", "before_rename", "between_renames", "after_rename"])
def test_who_saves_dies(client: DataPlaneClient, kill: Kill, tmp_path: Path, at: str, connection_kind: str) -> None:
    client.checkpoint(tmp_path / "c")
    older = whole(tmp_path / "c")
    client.put_samples(["new"], "p")
    kill("checkpoint", f"checkpoint.{at}", tmp_path / "c", connection_kind)
    live = 6 if at == "after_rename" else 5
    assert whole(tmp_path / "c").partitions[0].saved.live == live
    if at != "after_rename":
        assert whole(tmp_path / "c").files == older.files
    assert client.restore(tmp_path / "c", replace=True).partitions == {"p": live}
    client.put_samples(["new"], "p")
    kill("checkpoint", f"checkpoint.{at}", tmp_path / "d", connection_kind)
    assert (tmp_path / "d").exists() == (at == "after_rename")
    soon(client, lambda stats: not any(unit.pinned_bytes for unit in stats.units))
    for name in "cd":
        client.checkpoint(tmp_path / name)
        assert whole(tmp_path / name).partitions[0].saved.live == 6
        assert len(list((tmp_path / name).iterdir())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


@pytest.mark.parametrize("at", ["verified", "stored", "before_publish"])
def test_who_restores_dies(client: DataPlaneClient, kill: Kill, tmp_path: Path, at: str) -> None:
    client.put_samples(IDS, "p", {"y": torch.ones(5)})
    client.checkpoint(tmp_path / "c")
    client.clear_samples(None, "p")
    client.register_partition("other", ["x"], 1, ["train"])
    kill("restore", f"restore.{at}", tmp_path / "c", "local")
    soon(client, lambda stats: [found.partition for found in stats.partitions] == ["other"])
    soon(client, lambda s: not any(unit.live_bytes + unit.reserved_bytes + unit.retired_bytes for unit in s.units))
    client.restore(tmp_path / "c")
    assert client.get_samples(IDS, "p", ["y"])["y"].tolist() == [1.0] * 5
