"""A thousand sessions in eight processes on one machine: no error, and little of the service's memory for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil
import pytest
import torch
import zmq

import dataplane
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import dealer_socket
from tests import crowd
from tests.faults.forks import forks
from tests.restarts import wait_until

SESSIONS = 1000
PROCESSES = 8
LIMIT_S = 450.0
KIB = 1 << 10
MOST_BYTES = 400 * KIB
"""Of the service's memory for one session. 80 to 150 KiB were measured."""
MOST_FILES = 8
"""Of its open files for one session, in all processes of the service. 4 were measured."""


class Service:
    """`tq serve` where a process begins with 1,024 open files, as on many machines."""

    def __init__(self, token: str = "") -> None:
        environment = {**os.environ, **({"TQ_TOKEN": token} if token else {})}
        command = f"ulimit -Sn 1024 && exec {sys.executable} -m dataplane serve --capacity 64m --session-timeout 600"
        self._process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        self.controller = psutil.Process(self._process.pid)
        self._parts = [self.controller, *self.controller.children()]

    def size(self) -> tuple[int, int]:
        """Bytes, but for shared memory, and open files."""
        memory = [part.memory_info() for part in self._parts]
        return sum(each.rss - each.shared for each in memory), sum(part.num_fds() for part in self._parts)

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=LIMIT_S)


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.end()


@pytest.fixture
def members(service: Service) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    begun = []
    for group in range(PROCESSES):
        ours, theirs = forks.Pipe()
        process = forks.Process(target=crowd.run, args=(service.address, group, SESSIONS // PROCESSES, theirs))
        process.start()
        theirs.close()
        begun.append((process, ours))
    yield begun
    for process, pipe in begun:
        process.kill()
        process.join()
        pipe.close()


def hear(pipe: Connection) -> object:
    assert pipe.poll(LIMIT_S), "a process with sessions says nothing"
    said = pipe.recv()
    assert not isinstance(said, crowd.Failure), said
    return said


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_thousand_sessions(service: Service, members: list[tuple[BaseProcess, Connection]]) -> None:
    pipes = [pipe for _, pipe in members]
    with dataplane.connect(service.address, **crowd.LONG_TIMEOUTS) as client:
        client.register_partition("turns", ["x"], SESSIONS, ["train"])
        client.register_partition("parked", ["x"], SESSIONS, ["train"])
        before = service.size()
        for pipe in pipes:
            pipe.send("begin")
        for pipe in pipes:
            assert hear(pipe) == "turns done"
        wait_until(lambda: parked_claims(client) == SESSIONS, "every session has a claim that waits", LIMIT_S)
        # More for a moment where sessions are looked for again, as heartbeats were late.
        at_most = wait_until(lambda: few_files(service, before), "few open files for each session", LIMIT_S)
        ids = [f"{number % PROCESSES}-{number}" for number in range(SESSIONS)]
        client.put_samples(ids, "parked", {"x": [torch.tensor(crowd.content(each)) for each in ids]})
        got = [each for pipe in pipes for each in hear(pipe)]  # type: ignore[attr-defined]
        assert sorted(got) == sorted(ids)
        assert len(client.stats().sessions) == SESSIONS + 1
        for pipe in pipes:
            pipe.send("close")
        for pipe in pipes:
            assert hear(pipe) == "closed"
        wait_until(lambda: len(client.stats().sessions) == 1, "every session ended", LIMIT_S)
        wait_until(lambda: service.size()[1] - before[1] < SESSIONS / 10, "their files are closed", LIMIT_S)
    nbytes, files = ((most - less) / SESSIONS for most, less in zip(at_most, before, strict=True))
    print(f"{SESSIONS} sessions: {nbytes / KIB:.0f} KiB and {files:.1f} open files of the service for each")
    assert nbytes < MOST_BYTES


def few_files(service: Service, before: tuple[int, int]) -> tuple[int, int] | None:
    """The service's size, once its sessions have at most `MOST_FILES` each."""
    size = service.size()
    return size if size[1] - before[1] < MOST_FILES * SESSIONS else None


def parked_claims(client: dataplane.DataPlaneClient) -> int:
    return sum(each.waiting_claims for each in client.stats().partitions if each.partition == "parked")


HANDSHAKES = 8192
AT_ONCE = 256


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_handshakes() -> None:
    """Each of a client of its own. 5 s of the service's processor time were measured for all of them."""
    token = "t" * 32
    service = Service(token)
    before = sum(service.controller.cpu_times()[:2])
    with zmq.Context() as context:
        context.max_sockets = 2 * AT_ONCE
        for _ in range(HANDSHAKES // AT_ONCE):
            peers = [dealer_socket(context, f"tcp://{service.address}", token) for _ in range(AT_ONCE)]
            for peer in peers:
                peer.send_multipart(zmq_frames.request(c.Identify(protocol_version=PROTOCOL_VERSION)))
            for peer in peers:
                assert peer.poll(int(1000 * LIMIT_S)), "no answer"
                (reply,) = zmq_frames.Reply.parse(peer.recv_multipart())
                assert reply.error is None
                peer.close(linger=0)
    print(f"{HANDSHAKES} handshakes: {sum(service.controller.cpu_times()[:2]) - before:.1f} s of processor time")
    with dataplane.connect(service.address, token=token) as client:
        client.stats()
    service.end()
