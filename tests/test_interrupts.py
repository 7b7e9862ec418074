"""Ctrl-C at bytecodes spread over the whole of a call: the client goes on, nothing counts as under way, and neither
pins nor space are left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.restarts import WAIT_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCENES = """
import sys
import torch
from dataplane import connect, serve
from dataplane.ledger import commands as c
from tests.interrupting import interrupt_everywhere
from tests.restarts import wait_until

scene, remote, most, within = sys.argv[1], sys.argv[2] == "remote", int(sys.argv[3]), tuple(sys.argv[4].split(" "))
IDS = ["a", "b", "c"]
ONES = {"x": torch.ones(3, 20_000)}
with serve({"capacity_bytes": 32 << 20}) as service:
    client = connect(service.address, force_remote=remote)
    client.register_partition("p", ["x"], None, ["t"])
    session = client._connections.get()
    client.put_samples(IDS, "p", ONES)

    def get():
        assert (client.get_samples(IDS, "p", ["x"])["x"] == 1).all()

    scenes = {
        "post": lambda: session._channel.post(c.Release(located=10**6)),
        "put": lambda: client.put_samples(IDS, "p", ONES),
        "small put": lambda: client.put_samples(IDS, "p", {"y": torch.ones(3, 2)}),
        "get": get,
        "views": lambda: client.get_samples(IDS, "p", ["x"], copy=False),
        "claim": lambda: client.claim_meta("p", "t", ["x"], 3, blocking=False),
    }

    def go_on(step):
        client.put_samples(IDS, "p", ONES)
        get()

    after = (lambda step: client.stats()) if scene == "post" else go_on
    assert interrupt_everywhere(scenes[scene], most, after, within=within) > min(most, 200) // 2
    connections = session.session_state.connections._connections.values()
    in_flight = [session._copies, session._channel._in_flight, *[connection._in_flight for connection in connections]]
    assert not any(map(len, in_flight)), [len(each) for each in in_flight]
    client.clear_samples(None, "p")

    def nothing_left():
        unit = client.stats().units[0]
        held = unit.live_bytes, unit.retired_bytes, unit.pinned_bytes, unit.reserved_bytes
        return not any(held)

    wait_until(nothing_left, "pins and space are given back")
    client.close()
"""


EVERYWHERE = ("",)
STEPS = (
    "client/session.py",
    "client/operations/put.py",
    "client/operations/get.py",
    "client/preallocated.py",
    "client/session_state.py",
    "client/operations/retry.py",
)
"""What performs an operation, and knows what it was given."""


@pytest.mark.parametrize(
    ("scene", "connection_kind", "most", "within"),
    [
        ("post", "local", 600, EVERYWHERE),
        ("put", "local", 50, EVERYWHERE),
        ("put", "remote", 50, EVERYWHERE),
        ("small put", "local", 50, EVERYWHERE),
        ("get", "local", 50, EVERYWHERE),
        ("get", "remote", 50, EVERYWHERE),
        ("claim", "local", 50, EVERYWHERE),
        ("put", "local", 250, STEPS),
        ("small put", "local", 250, STEPS),
        ("get", "local", 250, STEPS),
        ("views", "local", 250, STEPS),
        ("put", "remote", 400, ("storage/transport/connection.py",)),
    ],
)
def test_the_client_goes_on_after_an_interrupt_anywhere_in_a_call(
    scene: str, connection_kind: str, most: int, within: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", SCENES, scene, connection_kind, str(most), " ".join(within)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
