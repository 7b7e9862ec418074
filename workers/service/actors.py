"""The actors of a service, except its supervisor: the controller and the storage units."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace

import ray
from ray.exceptions import ActorUnavailableError, RayError

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.storage.unit import StorageUnit

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Delay before a request to an actor that restarts or ends is repeated."""


class ComponentActor:
    """An actor whose process exits when its component fails. Ray then restarts the actor, or its callers get errors.

    `_stopping`: set when the actor stops its component itself, whose end is then no failure.
    """

    def __init__(self) -> None:
        self._stopping = False

    def alive(self) -> None:
        """Do nothing: the response shows that the actor runs."""

    def _exit_when_set(self, ended: threading.Event, what: str) -> None:
        """Start a thread that exits the process when the component sets `ended`, unless the actor is stopping. what:
        names the component in the log."""

        def wait() -> None:
            ended.wait()
            if not self._stopping:
                log.error("Actor of %s exits: its component failed", what)
                os._exit(1)

        threading.Thread(target=wait, name="tq-end", daemon=True).start()


class ControllerActor(ComponentActor):
    """The controller in a separate process. After a restart of the actor by Ray, it starts the controller at once.

    `_node_choices`: ids of the added and of the drained nodes. The actor only stores them, for the supervisor.
    """

    def __init__(self, config: DataPlaneConfig) -> None:
        super().__init__()
        self._config = config
        self._controller: Controller | None = None
        self._node_choices: tuple[list[str], list[str]] = ([], [])
        if was_restarted():
            self.start()

    def start(self) -> str:
        """Listen on this node's address. Return "host:port"."""
        self._controller = Controller(replace(self._config, host=ray.util.get_node_ip_address())).start()
        self._exit_when_set(self._controller.ended, "the controller")
        return self._controller.address

    def address(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.address

    def store_node_choices(self, added: list[str], drained: list[str]) -> None:
        """Store the nodes that `add_node` added and that were drained, for a restarted supervisor."""
        self._node_choices = added, drained

    def stored_node_choices(self) -> tuple[list[str], list[str]]:
        return self._node_choices

    def http_url(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.http_url

    def stop(self) -> None:
        self._stopping = True
        if self._controller is not None:
            self._controller.stop()

    def __ray_shutdown__(self) -> None:
        self.stop()


class StorageUnitActor(ComponentActor):
    """A storage unit in a separate process, on the node whose memory it serves.

    supervisor: name and namespace of the service's supervisor actor. The unit survives a restart of the supervisor's
    process. When the supervisor actor has ended, the unit stops and its process exits.

    `_unit` is None until `start`. `_stop_lock`: a call of `stop` and the thread that waits for the supervisor may stop
    the unit at the same time.
    """

    def __init__(
        self, config: DataPlaneConfig, controller_address: str, name: str, supervisor: tuple[str, str]
    ) -> None:
        super().__init__()
        self._config = config
        self._controller_address = controller_address
        self._name = name
        self._unit: StorageUnit | None = None
        self._stop_lock = threading.Lock()
        threading.Thread(target=self._stop_after_supervisor, args=supervisor, name="tq-supervised", daemon=True).start()

    def start(self) -> None:
        """Create the arena, listen on this node's address, and register with the controller. Further calls have no
        effect."""
        if self._unit is None:
            config_here = replace(self._config, host=ray.util.get_node_ip_address())
            self._unit = StorageUnit(config_here, self._controller_address, name=self._name).start()
            self._exit_when_set(self._unit.lost, f"storage unit {self._name}")

    def unit_id(self) -> int:
        """Return the unit's id at the controller. It changes if the unit had to register again without its rows."""
        assert self._unit is not None, "start comes first"
        return self._unit.unit_id

    def drain(self, timeout_s: float, *, for_good: bool) -> None:
        """Move every row to other units and accept no new rows, as `DataPlaneClient.drain`. If that fails, accept new
        rows again, unless the node leaves `for_good`."""
        from dataplane.client.client import DataPlaneClient  # noqa: PLC0415 (torch, only when a unit is drained)

        unit_id = self.unit_id()
        with DataPlaneClient(replace(self._config, address=self._controller_address)) as client:
            try:
                # force: try it even if no other unit accepts new rows.
                client.drain(unit_id, timeout_s, force=for_good)
            except BaseException:
                if not for_good:
                    client.undrain(unit_id)
                raise

    def name_and_node(self) -> tuple[str, str]:
        """Return the unit's name and the id of its node."""
        return self._name, ray.get_runtime_context().get_node_id()

    def stop(self, *, for_good: bool = False) -> None:
        """See `StorageUnit.stop`."""
        self._stopping = True
        with self._stop_lock:
            if self._unit is not None:
                self._unit.stop(for_good=for_good)

    def __ray_shutdown__(self) -> None:
        self.stop()

    def _stop_after_supervisor(self, name: str, namespace: str) -> None:
        """Wait for the end of the supervisor actor, also across its restarts, then stop the unit and exit the process.
        Runs in a thread."""
        while not self._stopping:
            try:
                ray.get(ray.get_actor(name, namespace=namespace).until_end.remote())  # never returns, only raises
            except ActorUnavailableError:
                time.sleep(RETRY_S)  # Ray restarts the supervisor
            except (RayError, ValueError):  # ValueError: the name is free, the actor has ended
                break
        if not self._stopping:
            log.warning("Storage unit %s stops: its service has ended", self._name)
            with suppress(Exception):
                self.stop()
            os._exit(0)


def was_restarted() -> bool:
    """Whether Ray restarted this actor after its process had ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by Ray itself during this call
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
