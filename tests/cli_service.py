"""`tq serve` as a process of its own, for tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import our_files


class Service:
    """A `tq serve` process; `address` is what it printed."""

    def __init__(self, *arguments: str) -> None:
        self.files = our_files()
        command = [sys.executable, "-m", "dataplane", "serve", "--capacity", "8m", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        self.address = self.first_line.split()[-1]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        _, self.errors = self.process.communicate(timeout=60)
        return self.process.returncode


def child_of(service: Service) -> int:
    """The process of its one storage unit."""
    (child,) = psutil.Process(service.process.pid).children()
    return int(child.pid)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        service.process.kill()
        service.process.wait(60)
        for stream in (service.process.stdout, service.process.stderr):
            assert stream is not None
            stream.close()
