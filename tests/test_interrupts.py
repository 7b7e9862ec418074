"""Ctrl-C at bytecodes spread over the whole of a call: the session ends, the client goes on with another one, and the
service keeps nothing of the old one and loses no sample."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.restarts import WAIT_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCENES = """
import asyncio
import gc
import selectors
import sys
from pathlib import Path
import torch
from dataplane import connect, connect_async, serve
from tests.interrupting import PACKAGE, interrupt_everywhere
from tests.restarts import wait_until

scene, kind, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
IDS = ["a", "b", "c"]
ONES = {"x": torch.ones(3, 20_000)}
loop = asyncio.new_event_loop()
gc.freeze()  # makes collections quick
within = (PACKAGE, str(Path(asyncio.__file__).parent), selectors.__file__) if kind == "async" else (PACKAGE,)

class Driven:
    # An async client, one call at a time.
    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        def call(*arguments, outcomes=None, **options):
            outcomes = [] if outcomes is None else outcomes
            async def called():
                outcomes.append(await getattr(self.client, name)(*arguments, **options))
            task = loop.create_task(called())
            while not task.done():
                try:
                    loop.run_until_complete(task)
                except RuntimeError as error:  # the stop of an interrupted run
                    assert "stopped before Future completed" in str(error)
            task.result()
            return outcomes[-1]
        return call

def run_on():
    # An interrupt between two steps of the loop leaves its stop, or the mark that it runs, to the next run.
    loop._thread_id = None
    asyncio._set_running_loop(None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    gc.collect()
    return True

with serve({"capacity_bytes": 32 << 20, "session_timeout_s": 5.0}) as service, connect(service.address) as observer:
    observer.register_partition("p", ["x"], None, ["t"])
    observer.register_partition("q", ["x"], None, ["t"])

    def opened():
        if kind == "async":
            return Driven(connect_async(service.address))
        return connect(service.address, force_remote=kind == "remote")

    client = opened()
    client.put_samples(IDS, "p", ONES)
    put, delivered = [f"s{number}" for number in range(2 * most + 9)], []
    observer.put_samples(put, "q", {"x": torch.ones(len(put))})

    def get():
        assert (client.get_samples(IDS, "p", ["x"])["x"] == 1).all()

    def claim():
        if kind == "async":
            client.claim_meta("q", "t", ["x"], 1, timeout_s=30.0, outcomes=delivered)
        else:
            delivered.append(client.claim_meta("q", "t", ["x"], 1, timeout_s=30.0))

    def close():
        closed = opened()
        dropped.append(closed)
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

    dropped = []

    def go_on(step):
        dropped.clear()  # here, as an interrupt in a finalizer is raised nowhere
        run_on()
        client.put_samples(IDS, "p", ONES)
        get()

    # The test's own frames belong to no module of the package: an interrupt never falls between a result and its use.
    assert interrupt_everywhere(scenes[scene], most, go_on, within=within) > min(most, 200) // 2
    wait_until(lambda: run_on() and len(observer.stats().sessions) == 2, "the interrupted sessions end")
    rest = observer.claim_meta("q", "t", ["x"], len(put) + 1, blocking=False).sample_ids
    # (A claim that the service answered to nobody is returned when its session ends.)
    claimed = {name for meta in delivered for name in meta.sample_ids}
    assert sorted({*claimed, *rest}) == sorted(put), "no sample is lost"
    observer.clear_samples(None, "p")

    def nothing_left():
        run_on()  # the heartbeats of an async client, which give up idle space
        unit = observer.stats().units[0]
        held = unit.retired_bytes, unit.pinned_bytes, unit.reserved_bytes
        return not any(held)

    wait_until(nothing_left, "pins and space are given back")
    client.close()
"""


@pytest.mark.parametrize("connection_kind", ["local", "remote", "async"])
@pytest.mark.parametrize(
    ("scene", "most"), [("put", 40), ("small put", 40), ("get", 40), ("views", 30), ("claim", 40), ("close", 30)]
)
def test_the_client_goes_on_with_another_session_after_an_interrupt_anywhere_in_a_call(
    scene: str, connection_kind: str, most: int
) -> None:
    command = [sys.executable, "-c", SCENES, scene, connection_kind, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
