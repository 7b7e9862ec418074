"""Trains with an unmodified verl on two hosts, once with each queue, and compares as `train.py` does:

    PYTHONPATH=CHECKOUT python nodes.py
    PYTHONPATH=CHECKOUT python nodes.py --critic --validate

Each host is a network namespace with an address, a boot id and shared memory of its own (`tests/faults/hosts.py`; it
needs root), a node of Ray, and has one worker. Rows go from one host's storage unit to the other's worker through the
cable.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from train import Training, agree, arguments, read, run, show_seconds, training

from tests.faults.cable import DEVICE
from tests.faults.hosts import Hosts, missing, wait_until

PORT = 6379
STORE_BYTES = 80 << 20
"""Of Ray's object store on each host, whose /dev/shm has 256 MiB."""
UNIT_BYTES = 64 << 20


def variables(begun: Training) -> list[str]:
    """Of the processes of Ray, which those of the training inherit."""
    ours = {name: value for name, value in begun.environment.items() if os.environ.get(name) != value}
    return ["env", *(f"{name}={value}" for name, value in ours.items()), f"GLOO_SOCKET_IFNAME={DEVICE}"]


@contextmanager
def nodes(begun: Training, hosts: Hosts, work: Path) -> Iterator[None]:
    """A node of Ray on each host; the first one's is the head."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-gpus=1", "--num-cpus=8"]
    ray += [f"--object-store-memory={STORE_BYTES}"]
    head = [f"--node-ip-address={hosts.one.address}", "--head", f"--port={PORT}", "--include-dashboard=false"]
    joins = [f"--node-ip-address={hosts.two.address}", f"--address={hosts.one.address}:{PORT}"]
    running = [hosts.one.run(*variables(begun), *ray, *head, f"--temp-dir={work}/ray")]
    status = hosts.one.inside(*variables(begun), *ray[:1], "status", f"--address={hosts.one.address}:{PORT}")
    try:
        wait_until(lambda: b"/1.0 GPU" in answer(status), "the head of Ray runs")
        running.append(hosts.two.run(*variables(begun), *ray, *joins))
        wait_until(lambda: b"/2.0 GPU" in answer(status), "both nodes are there")
        yield
    finally:
        for each in reversed(running):
            each.end()


def answer(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=False).stdout


def main() -> None:
    if lacking := missing():
        raise SystemExit(f"no hosts can be made on this machine: {lacking}")
    options = arguments(str(__doc__))
    runs: dict[str, list[dict[str, Any]]] = {}
    own = list(options.set)
    for queue in options.queues.split(","):
        folder = options.work / f"{queue}-hosts"
        folder.mkdir()
        with Hosts(folder) as hosts:
            options.cluster = f"{hosts.one.address}:{PORT}"
            options.set = [*own, "trainer.nnodes=2"]
            if queue == "adapter":
                options.set.append(f"+transfer_queue.dataplane.capacity_bytes={UNIT_BYTES}")
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of both nodes and the driver
            begun = training(queue, options, **token)
            with nodes(begun, hosts, folder):
                command = hosts.one.inside("env", f"GLOO_SOCKET_IFNAME={DEVICE}", *begun.command)
                why = run(replace(begun, command=command))
        if why:
            raise SystemExit(f"{queue}: the training {why}; the end of {begun.log}:\n{begun.log.read_text()[-3000:]}")
        runs[queue] = read(queue, options.work)
        show_seconds(queue, runs[queue])
    if not agree(options, runs):
        raise SystemExit("the two queues did not train alike")


if __name__ == "__main__":
    main()
