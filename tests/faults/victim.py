"""A client process that dies, or stops, at a named failpoint. `python -m tests.faults.victim ADDRESS SETTINGS-JSON`.

Settings: road ("local" or "remote"), job ("put", "get", "claim", "views", or with a path "checkpoint" and "restore"),
at (failpoint, or "" to wait for the parent), how ("kill": by SIGKILL at the place; "stop": by SIGSTOP), partition.
Prints "there" just before it dies or waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

from dataplane import connect, failpoints

MIB = 1 << 20


def main(address: str, settings: dict[str, Any]) -> None:
    client = connect(address, force_remote=settings["road"] == "remote", heartbeat_s=0.2, client_name="victim")
    if settings["job"] != "restore":
        client.list_samples(settings["partition"])

    def die() -> None:
        failpoints.disarm()
        print("there", flush=True)
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
        print(views, flush=True)
    elif settings["job"] in ("checkpoint", "restore"):
        getattr(client, settings["job"])(settings["path"])
    elif settings["job"] == "claim":
        print("claiming", flush=True)
        client.claim_meta(partition, "train", ["x"], settings.get("batch", 5), timeout_s=600)
        client.list_samples("elsewhere")
    print("survived", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
