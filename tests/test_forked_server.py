"""A process that serves and forks: the child neither serves nor stops the service, and holds no port."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from dataplane import connect, serve
from dataplane.core import ports
from dataplane.core.addresses import split_address
from tests.children import Child

pytestmark = pytest.mark.integration

PROGRAM = """
import os, signal, sys
import dataplane

settings = {"state_dir": sys.argv[1], "arena_dir": sys.argv[2], "http_port": 0, "capacity_bytes": 16 << 20}
server = dataplane.serve(settings)
read, write = os.pipe()
if os.fork() == 0:
    server.close()
    os.write(write, b"closed")
    sys.stdin.read()
    os._exit(0)
os.read(read, 6)
print(server.address, server.http_address, flush=True)
signal.pause()
"""


def test_a_forked_child_neither_ends_the_service_nor_keeps_its_ports(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", PROGRAM, tmp_path / "state", tmp_path]) as parent:
        address, http_address = parent.line().split()
        with urllib.request.urlopen(f"http://{http_address}/healthz", timeout=60.0) as answer:
            assert answer.status == 200
        with connect(address) as client:
            client.register_partition("p", ["x"], None, ["t"])
        parent.kill()
        parent.wait()
        # The child goes on, and reads on.
        settings = {"state_dir": str(tmp_path / "state"), "arena_dir": str(tmp_path), "capacity_bytes": 16 << 20}
        with serve(settings) as again:
            assert again.address == address
            with connect(address) as client:
                assert [part.partition for part in client.stats().partitions] == ["p"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(split_address(http_address), timeout=5.0)


def test_a_child_keeps_what_is_not_the_services() -> None:
    ours, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with ours, other:
        numbers = [each.getsockname()[1] for each in (ours, other)]
        ports.listens_at(numbers[:1])
        child = os.fork()
        if child == 0:
            alive = [Path(f"/proc/self/fd/{each.fileno()}").readlink() for each in (ours, other)]
            os._exit(0 if str(alive[0]) == os.devnull and str(alive[1]).startswith("socket:") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ports.listens_no_more_at(numbers[:1])
        assert ours.getsockname()[1] == numbers[0]
