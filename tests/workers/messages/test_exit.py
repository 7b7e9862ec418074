"""The end of a Python process whose messages travel by process groups."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EXIT = """
import torch
from workers.directory import Directory, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.messages import Messenger

names = [WorkerAddress("g", rank) for rank in range(2)]
with Directory.serve() as directory:
    a, b = (Messenger(name, DirectoryClient(directory.address), collectives="always") for name in names)
    for _ in range(3):
        a.send(torch.ones(1 << 20), names[1], async_op=True)
        assert b.recv(names[0]).sum() == 1 << 20
    if CLOSES:
        a.close()
        b.close()
"""


@pytest.mark.parametrize("closes", [True, False])
def test_no_thread_of_a_group_aborts_the_exit_of_python(closes: bool) -> None:
    script = EXIT.replace("CLOSES", str(closes))
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], timeout=100, check=True)
