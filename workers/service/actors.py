"""The actors that a service is made of, its supervisor aside."""

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

ASK_AGAIN_S = 1.0


class EndsWithItsPart:
    """An actor's process ends when what it runs did so by itself: it is started again, or its users learn of it."""

    def __init__(self) -> None:
        self._stopping = False

    def alive(self) -> None:
        """Nothing: an answer is enough."""

    def _end_with(self, ended: threading.Event, what: str) -> None:
        def wait() -> None:
            ended.wait()
            if not self._stopping:
                log.error("%s cannot go on: its actor ends", what)
                os._exit(1)

        threading.Thread(target=wait, name="tq-end", daemon=True).start()


class ControllerActor(EndsWithItsPart):
    """The controller in a process of its own. One that Ray started again goes on by itself."""

    def __init__(self, config: DataPlaneConfig) -> None:
        super().__init__()
        self._config = config
        self._controller: Controller | None = None
        self._told: tuple[list[str], list[str]] = ([], [])
        if started_again():
            self.start()

    def start(self) -> str:
        """Listen on this node's address; returns "host:port"."""
        self._controller = Controller(replace(self._config, host=ray.util.get_node_ip_address())).start()
        self._end_with(self._controller.ended, "the controller")
        return self._controller.address

    def address(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.address

    def remember(self, asked: list[str], drained: list[str]) -> None:
        """Which nodes the supervisor was told to take and to leave, for its next run."""
        self._told = asked, drained

    def remembered(self) -> tuple[list[str], list[str]]:
        return self._told

    def http_url(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.http_url

    def stop(self) -> None:
        self._stopping = True
        if self._controller is not None:
            self._controller.stop()

    def __ray_shutdown__(self) -> None:
        self.stop()


class StorageUnitActor(EndsWithItsPart):
    """A storage unit in a process of its own, on the node whose memory it serves.

    supervisor: name and namespace of the actor that it belongs to. It outlives that actor's process, but not the actor:
    when there is none any more, the unit stops and its process ends.
    """

    def __init__(
        self, config: DataPlaneConfig, controller_address: str, name: str, supervisor: tuple[str, str]
    ) -> None:
        super().__init__()
        self._config = config
        self._where = controller_address
        self._name = name
        self._unit: StorageUnit | None = None
        self._stopped = threading.Lock()
        threading.Thread(target=self._end_with_supervisor, args=supervisor, name="tq-supervised", daemon=True).start()

    def start(self) -> None:
        """Make the arena, listen on this node's address, register with the controller. Once."""
        if self._unit is None:
            here = replace(self._config, host=ray.util.get_node_ip_address())
            self._unit = StorageUnit(here, self._where, name=self._name).start()
            self._end_with(self._unit.lost, f"storage unit {self._name}")

    def number(self) -> int:
        """What the controller calls it; another if it had to begin anew."""
        assert self._unit is not None, "start comes first"
        return self._unit.number

    def drain(self, timeout_s: float, *, for_good: bool) -> None:
        """Move every row to other units, and take no new ones, as `DataPlaneClient.drain`. Where that fails, it
        takes new rows again, unless it is to end `for_good`."""
        from dataplane.client.client import DataPlaneClient  # noqa: PLC0415 (torch, only when a unit is drained)

        number = self.number()
        with DataPlaneClient(replace(self._config, address=self._where)) as client:
            try:
                client.drain(number, timeout_s, force=for_good)
            except BaseException:
                if not for_good:
                    client.undrain(number)
                raise

    def where(self) -> tuple[str, str]:
        """The unit's name, and the id of its node."""
        return self._name, ray.get_runtime_context().get_node_id()

    def stop(self, *, for_good: bool = False) -> None:
        """See `StorageUnit.stop`."""
        self._stopping = True
        with self._stopped:
            if self._unit is not None:
                self._unit.stop(for_good=for_good)

    def __ray_shutdown__(self) -> None:
        self.stop()

    def _end_with_supervisor(self, name: str, namespace: str) -> None:
        while not self._stopping:
            try:
                ray.get(ray.get_actor(name, namespace=namespace).until_end.remote())
            except ActorUnavailableError:
                time.sleep(ASK_AGAIN_S)  # Ray starts it again
            except (RayError, ValueError):
                break
        if not self._stopping:
            log.warning("storage unit %s ends, as its service has", self._name)
            with suppress(Exception):
                self.stop()
            os._exit(0)


def started_again() -> bool:
    """Whether Ray made this actor anew after its process had ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, on the way there
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
