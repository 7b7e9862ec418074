"""What a user does first with an installed wheel: `tq` from a shell, and a client of the service that it starts.

Run by the interpreter that the wheel is installed for; imports nothing of the tests. Ends with a traceback where
something is wrong.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import torch

import dataplane
import workers

TQ = Path(sys.executable).with_name("tq")
CAPACITY = "64m"


def tq(*arguments: str) -> str:
    """What `tq` says; its exit code has to be 0."""
    done = subprocess.run([TQ, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"tq {' '.join(arguments)}: code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    for package in (dataplane, workers):
        assert package.__file__ is not None
        assert Path(package.__file__).is_relative_to(sys.prefix), f"{package.__file__} is not the wheel's"
        assert importlib.resources.files(package).joinpath("py.typed").is_file(), f"{package.__name__} is not typed"
    switch_on()
    assert "serve" in tq("--help")
    with subprocess.Popen(
        [TQ, "serve", "--capacity", CAPACITY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        try:
            assert service.stdout is not None
            address = service.stdout.readline().split()[-1]
            put_and_get(address)
            assert "partition train: 2 live" in tq("status", address)
        finally:
            service.terminate()
            try:
                _, errors = service.communicate(timeout=60)
            finally:
                service.kill()
    assert service.returncode == 0, errors
    print(f"the wheel of {importlib.metadata.version('rl-dataplane')} works")


def switch_on() -> None:
    """The hook is where Python reads it, whether the package TransferQueue is installed or not."""
    code = "import transfer_queue; print(transfer_queue.__name__)"
    command = [sys.executable, "-P", "-m", "dataplane.compat.transfer_queue", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "dataplane.compat.transfer_queue\n"), done


def put_and_get(address: str) -> None:
    with dataplane.connect(address) as client:
        client.register_partition("train", ["input_ids"], num_samples=2, consumer_tasks=["policy"])
        client.put_samples(["a", "b"], "train", {"input_ids": [torch.arange(3), torch.arange(5)]})
        meta = client.claim_meta("train", "policy", ["input_ids"], batch_size=2)
        rows = client.get_data(meta)["input_ids"].unbind()
        assert [row.tolist() for row in rows] == [[0, 1, 2], [0, 1, 2, 3, 4]]


if __name__ == "__main__":
    main()
