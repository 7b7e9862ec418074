"""Trains with an unmodified verl on two hosts, once with each queue, and compares as `train.py` does:

    PYTHONPATH=CHECKOUT python nodes.py
    PYTHONPATH=CHECKOUT python nodes.py --critic --validate

Each host is a network namespace with an address, a boot id and shared memory of its own (`tests/faults/hosts.py`; it
needs root), a node of Ray, and has one worker. Rows go from one host's storage unit to the other's worker through the
cable.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train import LIMIT_S, Training, agree, arguments, read, show_seconds, training

from tests.faults.cable import DEVICE
from tests.faults.hosts import Host, Hosts, missing

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
    status = hosts.one.inside(*ray[:1], "status", f"--address={hosts.one.address}:{PORT}")
    try:
        wait_until(lambda: succeeds(status), "the head of Ray runs")
        running.append(hosts.two.run(*variables(begun), *ray, *joins))
        wait_until(lambda: b"/2.0 GPU" in subprocess.run(status, capture_output=True).stdout, "both nodes are there")
        yield
    finally:
        for each in reversed(running):
            each.end()


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def wait_until(come: Any, what: str) -> None:
    end = time.monotonic() + 240
    while not come():
        if time.monotonic() > end:
            raise SystemExit(f"it did not come to: {what}")
        time.sleep(1)


def train(queue: str, options: argparse.Namespace, host: Host, begun: Training) -> list[dict[str, Any]]:
    """The driver runs on the host."""
    with begun.log.open("w") as output:
        done = subprocess.run(
            host.inside(*variables(begun), *begun.command),
            env=os.environ | begun.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    if done.returncode:
        raise SystemExit(f"{queue}: exit code {done.returncode}; {begun.log}:\n{begun.log.read_text()[-3000:]}")
    return read(queue, options.work)


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
            begun = training(queue, options)
            with nodes(begun, hosts, folder):
                runs[queue] = train(queue, options, hosts.one, begun)
        show_seconds(queue, runs[queue])
    if not agree(options, runs):
        raise SystemExit("the two queues did not train alike")


if __name__ == "__main__":
    main()
