"""The disk of the state directory is full, or read-only, under a real `tq serve`: calls are refused and change nothing,
it goes on when there is space, and no later run does what was refused."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, StateDirError, connect, serve
from dataplane.core import failpoints
from dataplane.storage.arena_record import discard
from tests.restarts import wait_until

pytestmark = pytest.mark.slow

WAIT_S = 60
DISK_BYTES = 24 << 20


class Disk:
    """A file system of its own, mounted at `path` for those processes only that it starts. Skips where the kernel lets
    nobody have one."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        script = f'mount -t tmpfs -o size={DISK_BYTES} none "$0" && echo ready && exec sleep infinity'
        self._holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            pytest.skip(f"no mount of our own here: {self._holder.stderr.read().strip()}")
        pid = self._holder.pid
        self.enter = ["nsenter", "-t", str(pid), "-U", "-m", "--preserve-credentials"]
        self._filler = Path(f"/proc/{pid}/root{path}/filler")

    def fill(self) -> None:
        with open(self._filler, "ab", buffering=0) as filler:
            for piece in (1 << 16, 1 << 10):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(piece))

    def empty(self) -> None:
        self._filler.unlink()

    def remount(self, how: str) -> None:
        subprocess.run([*self.enter, "mount", "-o", f"remount,{how}", str(self.path)], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate(timeout=WAIT_S)


class Service:
    """A `tq serve` process; `address` is what it printed, "" if it did not start."""

    def __init__(self, state: Path, enter: list[str], *arguments: str) -> None:
        command = [*enter, sys.executable, "-m", "dataplane", "serve", "--capacity", "8m", "--state-dir", str(state)]
        command += arguments
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().rpartition(" ")[2].strip()

    def end(self, number: int = signal.SIGKILL) -> str:
        """What it said on stderr."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=WAIT_S)[1]


class Scene:
    """A disk and the services that were started on it."""

    def __init__(self, path: Path) -> None:
        self.disk = Disk(path / "disk")
        self.state = self.disk.path / "state"
        self.services: list[Service] = []

    def serve(self) -> Service:
        """The arena is on that disk too: in /dev/shm other units, which cannot see the state directory, would remove it
        between two runs."""
        self.services.append(Service(self.state, self.disk.enter, "--arena-dir", str(self.disk.path)))
        return self.services[-1]

    def close(self) -> None:
        for service in self.services:
            service.end()
        self.disk.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


class Model:
    """What the service has said that it did. `attempt` does something that may be refused."""

    def __init__(self, client: DataPlaneClient) -> None:
        self.client = client
        self.samples: list[str] = []
        self.claimed: list[str] = []
        self.partitions = {"p"}
        self.refused = 0

    def put(self, name: str) -> None:
        self.client.put_samples([name], "p", {"x": torch.ones(1, 1000)})
        self.samples.append(name)

    def clear(self, name: str) -> None:
        self.client.clear_samples([name], "p")
        self.samples.remove(name)

    def claim(self) -> None:
        self.claimed += self.client.claim_meta("p", "train", ["x"], 1, blocking=False).sample_ids

    def register(self, name: str) -> None:
        self.client.register_partition(name, ["x"], None, ["train"])
        self.partitions.add(name)

    def attempt(self, act: Callable[..., object], *arguments: Any) -> None:
        try:
            act(*arguments)
        except StateDirError:
            self.refused += 1

    def attempt_all(self) -> None:
        for number in range(20):
            self.attempt(self.put, f"late{number}")
            self.attempt(self.register, f"late{number}")
            self.attempt(self.claim)
        self.attempt(self.clear, "s0")
        self.attempt(self.client.seal, "other")
        self.attempt(self.client.list_samples, "p")
        self.attempt(lambda: connect(self.client.config.address).close())

    def check(self, client: DataPlaneClient) -> None:
        """The service holds that and nothing else."""
        assert sorted(client.list_samples("p").sample_ids) == sorted(self.samples)
        assert {found.partition for found in client.stats().partitions} == self.partitions
        wait_until(lambda: self._idle(client), "the end of what was under way")

    @staticmethod
    def _idle(client: DataPlaneClient) -> bool:
        (unit,) = client.stats().units
        return unit.reserved_bytes == unit.pinned_bytes == unit.retired_bytes == 0


def begin(client: DataPlaneClient) -> Model:
    model = Model(client)
    for partition in ("p", "other"):
        model.register(partition)
    for number in range(4):
        model.put(f"s{number}")
    return model


def goes_on(model: Model) -> None:
    model.check(model.client)
    model.put("after")
    rest = model.client.claim_meta("p", "train", ["x"], 1000, min_batch_size=1, blocking=False).sample_ids
    assert not set(rest) & set(model.claimed)
    assert {*rest, *model.claimed} >= set(model.samples)


def test_a_full_disk_is_survived(scene: Scene) -> None:
    with connect(scene.serve().address, heartbeat_s=0.2) as client:
        model = begin(client)
        scene.disk.fill()
        while model.refused < 3:
            model.attempt_all()
        scene.disk.empty()
        goes_on(model)
        scene.services[-1].end()
        scene.serve()
        model.check(client)
    with connect(scene.services[-1].address) as another:
        model.check(another)


def test_no_byte_may_be_written(tmp_path: Path) -> None:
    """As above where nobody may mount anything: the process itself may write nothing more to files."""
    state = tmp_path / "state"
    service = Service(state, [])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        with connect(service.address, heartbeat_s=0.2) as client:
            model = begin(client)
            resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (0, hard))
            model.attempt_all()
            assert (model.refused, len(model.samples)) == (64, 4)
            resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            goes_on(model)
            service.end()
            service = Service(state, [])
            model.check(client)
    finally:
        service.end()
        discard(state, ["/dev/shm"])


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_service_does_not_start_where_it_cannot_write(scene: Scene, trouble: str) -> None:
    with connect(scene.serve().address) as client:
        model = begin(client)
    scene.services[-1].end()
    if trouble == "full":
        scene.disk.fill()
    else:
        scene.disk.remount("ro")
    refused = scene.serve()
    assert refused.process.wait(WAIT_S) == 1
    said = refused.end()
    assert f"state directory {scene.state}" in said
    assert trouble in said.lower()
    assert "Traceback" not in said
    if trouble == "full":
        scene.disk.empty()
    else:
        scene.disk.remount("rw")
    with connect(scene.serve().address) as client:
        model.check(client)
        model.client = client
        goes_on(model)


def test_a_disk_that_turns_read_only_under_the_service(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    state = tmp_path / "state"
    with serve({"state_dir": str(state), "capacity_bytes": 8 << 20}) as server, connect(server.address) as client:
        model = begin(client)
        failpoints.arm("journal.before_append", fail)
        model.attempt_all()
        assert (model.refused, len(model.samples)) == (64, 4)
        failpoints.disarm()
        goes_on(model)
    discard(state, ["/dev/shm"])
