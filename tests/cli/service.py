"""Services for tests of the command line: `tq serve` as a process of its own, and one in this process with something
in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch

from dataplane import DataPlaneClient, connect, serve
from dataplane.config import MIB
from tests.conftest import our_files

TQ = [
    sys.executable,
    "-c",
    "import sys; from dataplane.cli import main, session; from dataplane.config import DataPlaneConfig; "
    "DataPlaneConfig.__init__.__kwdefaults__['connect_timeout_s'] = session.COMPLETION_S = 60.0; sys.exit(main())",
]
"""`tq`, but for how long it waits for a service: one in a test process may be slow to answer on a busy machine."""

BUSY = ("was paused for", "did not confirm the session", "did not close within", "Ledger thread did not stop within")
"""What programs of ours say where the machine is too busy for one of their ends."""


def complaints(errors: str) -> list[str]:
    """The lines that a program wrote on standard error, but for those of a busy machine."""
    return [line for line in errors.splitlines() if not any(said in line for said in BUSY)]


class Service:
    """A `tq serve` process; `address` is what it printed, unless it is not waited for until it is ready."""

    def __init__(self, *arguments: str, await_ready: bool = True) -> None:
        self.files = our_files()
        command = [sys.executable, "-m", "dataplane", "serve", "--capacity", "8m", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline() if await_ready else ""
        if await_ready and not self.first_line:
            _, errors = self.process.communicate(timeout=60)
            pytest.fail(f"tq serve ended with {self.process.returncode}: {errors}")
        self.address = (self.first_line.split() or [""])[-1]

    @property
    def complaints(self) -> list[str]:
        return complaints(self.errors)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.output, self.errors = self.process.communicate(timeout=60)
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


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlaneClient]:
    """A client called `rollout-0` of a service that TQ_ADDRESS names, with a partition `train`: samples a, b and c have
    `ids` and `reward`, the first also `logprobs`; task `policy` leases a, and has nothing against the others."""
    with serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address, client_name="rollout-0") as client:
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        monkeypatch.delenv("TQ_TOKEN", raising=False)
        client.register_partition("train", ["ids", "reward", "logprobs"], 4, ["policy", "critic"])
        client.put_samples(
            ["a", "b", "c"],
            "train",
            {"ids": [torch.arange(n) for n in (5, 2, 9)], "reward": torch.zeros(3)},
            tags=[{"group": f"g{n}"} for n in range(3)],
        )
        client.put_samples(["a"], "train", {"logprobs": [torch.zeros(5)]})
        client.claim_meta("train", "policy", ["ids", "reward"], 1, lease_s=600)
        yield client
