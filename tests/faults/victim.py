"""A client process that dies, or stops, at a named failpoint.

Settings: connection_kind ("local" or "remote"), job ("put", "get", "claim", "views", or with a path "checkpoint" and
"restore"), at (failpoint, or "" to wait for the parent), how ("kill": by SIGKILL at the place; "stop": by SIGSTOP),
partition. Says "there" just before it dies or waits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from dataplane import connect
from dataplane.core import failpoints

MIB = 1 << 20


def main(address: str, settings: dict[str, Any], say: Callable[[str], None]) -> None:
    client = connect(
        address, force_remote=settings["connection_kind"] == "remote", heartbeat_s=0.2, client_name="victim"
    )
    if settings["job"] != "restore":
        client.list_samples(settings["partition"])

    def die() -> None:
        failpoints.disarm()
        say("there")
        os.kill(os.getpid(), signal.SIGKILL if settings["how"] == "kill" else signal.SIGSTOP)

    if settings["at"]:
        failpoints.arm(settings["at"], die)
    partition = settings["partition"]
    if settings["job"] == "put":
        rows = torch.zeros(5, MIB, dtype=torch.uint8)
        client.put_samples([f"v{n}" for n in range(5)], partition, {"x": rows})
    elif settings["job"] == "get":
        client.get_samples([f"s{n}" for n in range(5)], partition, ["x"])
    elif settings["job"] == "views":
        views = client.get_samples([f"s{n}" for n in range(5)], partition, ["x"], copy=False)
        die()
        say(str(views))
    elif settings["job"] in ("checkpoint", "restore"):
        getattr(client, settings["job"])(settings["path"])
    elif settings["job"] == "claim":
        say("claiming")
        client.claim_meta(partition, "train", ["x"], settings.get("batch", 5), timeout_s=600)
        client.list_samples("elsewhere")
    say("survived")


def play(pipe: Connection, address: str, settings: dict[str, Any]) -> None:
    """The victim as a process that says what it has to say through a pipe."""
    main(address, settings, pipe.send)
