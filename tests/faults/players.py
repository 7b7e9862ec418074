"""The processes of a storm: controller, storage units, producers and consumers, each of which may be killed or stopped.

Every row's content follows from its id, so that any reader can tell whether it is right. A client writes down what it
is about to do, and what it has done, before it goes on; so the rest can be reckoned up whenever it died.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataplane import (
    DataPlaneClient,
    DataPlaneConfig,
    DataPlaneError,
    KVBatchMeta,
    ServiceUnavailableError,
    SessionExpiredError,
    connect,
    failpoints,
)
from dataplane.control.controller import Controller
from dataplane.unit import StorageUnit

PARTITION, TASK = "storm", "train"
GROUP = 4
MOST_TOKENS = 3000
CLIENT = {"heartbeat_s": 0.2, "reconnect_s": 120.0, "put_timeout_s": 120.0, "call_timeout_s": 120.0}
SERVICE = {"reconnect_s": 600.0, "heartbeat_s": 0.2, "session_timeout_s": 2.0, "capacity_bytes": 16 << 20}
LEASE_S = 4.0


def content(name: str) -> dict[str, Any]:
    """The fields of sample `name`: tokens of a length of its own, a number, and a text."""
    seed = zlib.crc32(name.encode())
    tokens = np.random.default_rng(seed).integers(0, 1 << 40, 1 + seed % MOST_TOKENS)
    return {"tokens": torch.from_numpy(tokens), "number": float(seed % 1000), "text": f"{name}/{seed}"}


def columns(names: list[str]) -> dict[str, Any]:
    rows = [content(name) for name in names]
    return {
        "tokens": [row["tokens"] for row in rows],
        "number": torch.tensor([row["number"] for row in rows]),
        "text": [row["text"] for row in rows],
    }


def verify(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    """Read all fields of `meta` and compare each row with what its id says. AssertionError naming the sample."""
    batch = client.get_batch(meta, ["tokens", "number", "text"], layout="jagged")
    rows = batch["tokens"].unbind()
    for place, name in enumerate(meta.sample_ids):
        expected = content(name)
        assert torch.equal(rows[place], expected["tokens"]), f"torn or stale: tokens of {name}"
        assert batch["number"][place].item() == expected["number"], f"torn or stale: number of {name}"
        assert batch["text"][place] == expected["text"], f"torn or stale: text of {name}"


class Notes:
    """What a player writes down: a line is there, whole, once `write` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


def arm(failpoint: str) -> None:
    """Die by SIGKILL at the failpoint; "" is none."""
    if failpoint:
        failpoints.arm(failpoint, lambda: os.kill(os.getpid(), signal.SIGKILL))


def serve_controller(pipe: Connection, state: str, failpoint: str) -> None:
    arm(failpoint)
    with Controller(DataPlaneConfig(state_dir=state, units=0, **SERVICE)) as controller:
        pipe.send(controller.address)
        pipe.recv()


def serve_unit(pipe: Connection, state: str, address: str, name: str) -> None:
    with StorageUnit(DataPlaneConfig(state_dir=state, **SERVICE), address, name=name):
        pipe.send(name)
        pipe.recv()


def play(act: Callable[..., None], name: str, folder: str, progress: Any, failpoint: str, *arguments: Any) -> None:
    """Run a client's act for ever, with a new client whenever its session is over or the service cannot be reached.
    Anything unexpected is noted, and ends the process with code 3."""
    notes = Notes(Path(folder) / f"{name}.notes")
    arm(failpoint)
    try:
        while True:
            try:
                act(name, notes, progress, *arguments)
            except (SessionExpiredError, ServiceUnavailableError) as error:
                notes.write("error", type(error).__name__)
                time.sleep(0.05)
    except BaseException:
        notes.write("BAD", repr(traceback.format_exc()))
        sys.exit(3)


def note(notes: Notes, error: DataPlaneError) -> None:
    """An operation failed with a named error, as it may; raises what ends a session, and what must never be."""
    if isinstance(error, SessionExpiredError) or error.facts.get("lost"):
        raise error
    notes.write("error", type(error).__name__)


def produce(name: str, notes: Notes, progress: Any, address: str, remote: bool) -> None:
    """Put groups one after another; ids are never used twice, whatever became of a put."""
    with connect(address, client_name=name, force_remote=remote, **CLIENT) as client:
        while True:
            number = time.time_ns()
            ids = [f"{name}-{number}-{member}" for member in range(GROUP)]
            notes.write("putting", *ids)
            try:
                client.put_samples(ids, PARTITION, columns(ids), mode="create")
            except DataPlaneError as error:
                note(notes, error)
            else:
                notes.write("put", *ids)
            progress.value += 1


def consume(name: str, notes: Notes, progress: Any, address: str, remote: bool) -> None:
    """Claim on lease, read and verify, acknowledge, clear."""
    with connect(address, client_name=name, force_remote=remote, **CLIENT) as client:
        while True:
            try:
                meta = client.claim_meta(PARTITION, TASK, ["tokens"], GROUP, timeout_s=30.0, lease_s=LEASE_S)
                verify(client, meta)
                notes.write("acking", *meta.sample_ids)
                client.ack(meta)
                notes.write("acked", *meta.sample_ids)
                client.clear_samples(meta, PARTITION)
            except DataPlaneError as error:
                note(notes, error)
            progress.value += 1
