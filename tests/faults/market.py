"""Producers and trainers of one partition as processes of their own, which a test may kill.

What a process did comes back through the pipe that it was given.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from dataplane import connect
from tests.faults.forks import forks

PARTITION, TASK = "p", "train"
GROUP = 4


def start(role: Any, address: str, *arguments: Any) -> tuple[Any, Connection]:
    """A process that runs `role(address, pipe, *arguments)`, and this end of its pipe."""
    ours, theirs = forks.Pipe()
    process = forks.Process(target=role, args=(address, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def names(who: str, number: int) -> list[str]:
    """The samples of group `number` of a producer."""
    return [f"{who}-{number}-{member}" for member in range(GROUP)]


def produce(address: str, pipe: Connection, who: str, groups: int, dies_in: int | None) -> None:
    """Put `groups` groups, each in two halves; dies by SIGKILL between the halves of group `dies_in`."""
    with connect(address, client_name=who, heartbeat_s=0.2) as client:
        pipe.send("here")
        pipe.recv()
        for number in range(groups):
            whole = names(who, number)
            for half in (whole[: GROUP // 2], whole[GROUP // 2 :]):
                tags = [{"group": f"{who}-{number}"} for _ in half]
                client.put_samples(half, PARTITION, {"x": torch.full((len(half),), number)}, tags=tags)
                if number == dies_in:
                    os.kill(os.getpid(), signal.SIGKILL)
    pipe.send("done")


def train(address: str, pipe: Connection, who: str, claim: dict[str, Any], dies: bool) -> None:
    """Claim, read and acknowledge until there is no more, then send (ids acknowledged, ids told to be dropped); or die
    by SIGKILL once a claim is answered, its ids sent, and before it is acknowledged."""
    done: list[str] = []
    dropped: list[str] = []
    with connect(address, client_name=who, heartbeat_s=0.2) as client:
        pipe.send("here")
        pipe.recv()
        while True:
            meta = client.claim_meta(PARTITION, TASK, ["x"], 2 * GROUP, timeout_s=60.0, **claim)
            dropped += meta.extra_info.get("dropped_samples", [])
            if not meta.size:
                break
            values = client.get_data(meta)["x"].tolist()  # which confirms the claim, too
            assert values == [int(name.split("-")[1]) for name in meta.sample_ids]
            if dies:
                pipe.send(meta.sample_ids)
                os.kill(os.getpid(), signal.SIGKILL)
            client.ack(meta)
            done += meta.sample_ids
    pipe.send((done, dropped))
