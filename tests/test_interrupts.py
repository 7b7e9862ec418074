"""Ctrl-C at bytecodes spread over the whole of a call: the session ends, the client goes on with another one, and the
service keeps nothing of the old one and loses no sample."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.restarts import WAIT_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCENES = """
import gc
import sys
import torch
from dataplane import connect, serve
from tests.interrupting import interrupt_everywhere
from tests.restarts import wait_until

scene, kind, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
IDS = ["a", "b", "c"]
ONES = {"x": torch.ones(3, 20_000)}

with serve({"capacity_bytes": 32 << 20, "session_timeout_s": 5.0}) as service, connect(service.address) as observer:
    observer.register_partition("p", ["x"], None, ["t"])
    observer.register_partition("q", ["x"], None, ["t"])

    def opened():
        return connect(service.address, force_remote=kind == "remote")

    client = opened()
    client.put_samples(IDS, "p", ONES)
    put, delivered = [f"s{number}" for number in range(2 * most + 9)], []
    observer.put_samples(put, "q", {"x": torch.ones(len(put))})

    def get():
        assert (client.get_samples(IDS, "p", ["x"])["x"] == 1).all()

    def claim():
        delivered.extend(client.claim_meta("q", "t", ["x"], 1, timeout_s=30.0).sample_ids)

    def close():
        closed = opened()
        closed.put_samples(IDS, "p", ONES)
        closed.close()

    scenes = {
        "put": lambda: client.put_samples(IDS, "p", ONES),
        "small put": lambda: client.put_samples(IDS, "p", {"y": torch.ones(3, 2)}),
        "get": get,
        "views": lambda: client.get_samples(IDS, "p", ["x"], copy=False),
        "claim": claim,
        "close": close,
    }

    def go_on(step):
        client.put_samples(IDS, "p", ONES)
        get()

    # The test's own frames belong to no module of the package: an interrupt never falls between a result and its use.
    assert interrupt_everywhere(scenes[scene], most, go_on) > min(most, 200) // 2
    gc.collect()
    wait_until(lambda: len(observer.stats().sessions) == 2, "the interrupted sessions end")
    rest = observer.claim_meta("q", "t", ["x"], len(put) + 1, blocking=False).sample_ids
    # (A claim that the service answered to nobody is returned when its session ends.)
    assert sorted({*delivered, *rest}) == sorted(put), "no sample is lost"
    observer.clear_samples(None, "p")

    def nothing_left():
        unit = observer.stats().units[0]
        held = unit.retired_bytes, unit.pinned_bytes, unit.reserved_bytes
        return not any(held)

    wait_until(nothing_left, "pins and space are given back")
    client.close()
"""


@pytest.mark.parametrize("connection_kind", ["local", "remote"])
@pytest.mark.parametrize(
    ("scene", "most"), [("put", 60), ("small put", 60), ("get", 60), ("views", 40), ("claim", 60), ("close", 30)]
)
def test_the_client_goes_on_with_another_session_after_an_interrupt_anywhere_in_a_call(
    scene: str, connection_kind: str, most: int
) -> None:
    command = [sys.executable, "-c", SCENES, scene, connection_kind, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
