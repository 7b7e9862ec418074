"""What the pages say of shared memory between containers: who sees the unit's /dev/shm is local to it, and only they.

Containers are here what matters of them: namespaces of mounts, each with a /dev/shm of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

import dataplane
from tests.children import Child
from tests.ports import free_ports
from tests.restarts import wait_until

OWN_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
CLIENT = """
import sys, torch, dataplane
with dataplane.connect(sys.argv[1]) as client:
    client.put_samples([sys.argv[2]], "train", {"x": torch.arange(3)[None]})
    assert client.get_samples([sys.argv[2]], "train", ["x"])["x"].tolist() == [[0, 1, 2]]
    print("there", flush=True)
    sys.stdin.read()
"""


def can_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    tried = ["unshare", "--mount", "sh", "-c", OWN_SHM, "sh", "true"]
    return subprocess.run(tried, capture_output=True, timeout=60).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_unshare(), reason="only root, and not in every sandbox, makes namespaces of mounts"),
]


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """One in a container of its own: its process, its address, and the port of its unit's metrics."""
    port = free_ports(2)  # the unit's is the next one
    serve = [sys.executable, "-m", "dataplane", "serve", "--capacity", "8m", "--http-port", str(port)]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", OWN_SHM, "sh", *serve], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[-1]
        with dataplane.connect(address) as client:
            client.register_partition("train", ["x"], None, ["policy"])
        yield process, address, port + 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def attached(port: int) -> int:
    """How many sessions map the unit's arena, as it says itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        (found,) = re.findall(r"^tq_bulk_attached_sessions (\S+)$", answer.read().decode(), re.M)
    return int(float(found))


@pytest.mark.parametrize(
    ("place", "local"),
    [("in the same container", 1), ("in another container", 0), ("on the host", 0)],
)
def test_who_shares_shared_memory_is_local(
    service: tuple[subprocess.Popen[str], str, int], place: str, local: int
) -> None:
    process, address, port = service
    there = {
        "in the same container": ["nsenter", f"--mount=/proc/{process.pid}/ns/mnt"],
        "in another container": ["unshare", "--mount", "sh", "-c", OWN_SHM, "sh"],
        "on the host": [],
    }[place]
    command = [*there, sys.executable, "-c", CLIENT, address, place]
    with Child(command) as client:
        assert client.line() == "there"
        wait_until(lambda: attached(port) == local, "who came before is gone, and nobody else has mapped the arena")
        code, _, errors = client.finish()
    assert code == 0, errors
