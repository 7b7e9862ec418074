"""The processes of a storm's service: a controller, and storage units on two hosts.

What goes from one host to the other goes through the network of the storm, which can be disturbed.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane import CallTimeoutError, DataPlaneConfig, ServiceUnavailableError
from dataplane.controller import durable_ledger
from dataplane.controller.controller import Controller
from dataplane.storage import server as bulk
from dataplane.storage import unit as storage
from tests.faults.acting import Order, begin, serve

CAPACITY_BYTES = 16 << 20
BACKED_BYTES = 5 << 19
"""So much that a unit asks for more once a monument of half of it stands there."""
IMAGE_AFTER_RECORDS = 400
SERVICE = {"reconnect_s": 600.0, "heartbeat_s": 0.2, "session_timeout_s": 1.5, "capacity_bytes": CAPACITY_BYTES}
HERE, ELSEWHERE = "", "elsewhere"


def settings_of(folder: str) -> DataPlaneConfig:
    """Settings of all processes of the service."""
    return DataPlaneConfig(units=0, **SERVICE, state_dir=str(Path(folder) / "state"))


def serve_controller(pipe: Connection, name: str, folder: str, shared: Any, orders: list[Order]) -> None:
    """A controller that makes images often. Says its address; its port is in the file `controller.port`."""
    durable_ledger.SMALL_AFTER_RECORDS = IMAGE_AFTER_RECORDS
    actor = begin(name, folder, shared, orders)
    controller = Controller(settings_of(folder))

    def start() -> str:
        address = controller.start().address
        (actor.folder / "controller.port").write_text(address.rpartition(":")[2])
        return address

    serve(pipe, actor, start)


def serve_unit(
    pipe: Connection,
    name: str,
    folder: str,
    shared: Any,
    orders: list[Order],
    address: str,
    advertised_port: int,
    lives_on: str,
) -> None:
    """A storage unit that other hosts reach at `advertised_port`; where that leads to is in the file `NAME.port`."""
    actor = begin(name, folder, shared, orders, lives_on)
    bind = bulk.bind

    def bind_behind_the_network(*arguments: Any, **settings: Any) -> tuple[str, ...]:
        *near, far = bind(*arguments, **settings)
        before, _, port = far.rpartition(":")
        (actor.folder / f"{name}.port").write_text(port)
        return (*near, f"{before}:{advertised_port}")

    bulk.bind = bind_behind_the_network
    storage.FIRST_BACKING_BYTES = BACKED_BYTES
    config = settings_of(folder)

    def start() -> str:
        while True:
            try:
                storage.StorageUnit(config, address, name=name).start()
                return name
            except (ServiceUnavailableError, CallTimeoutError):  # whoever starts units would start it again
                time.sleep(0.1)

    serve(pipe, actor, start)
