"""What stands in the Ray cluster at the moment, for tests that nothing is left behind."""

from __future__ import annotations

import socket
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from tests.restarts import wait_until


def alive_placement_groups() -> set[str]:
    """Ids of the placement groups that were not removed."""
    return {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


def alive_actors(kind: str = "") -> set[str]:
    """Ids of the actors (of a class whose name ends in `kind`) that live or are about to."""
    table = ray._private.state.actors()
    return {
        name for name, entry in table.items() if entry["State"] != "DEAD" and entry["ActorClassName"].endswith(kind)
    }


def standing() -> set[str]:
    """Ids of all actors and placement groups that stand."""
    return alive_actors() | alive_placement_groups()


def nothing_but(before: set[str]) -> bool:
    """Whether it comes to that nothing stands that did not stand `before`, of which some may be gone: Ray ends what
    nobody has a handle of when it comes to it."""
    return bool(wait_until(lambda: standing() <= before, "nothing more than before"))


def can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True


def call_until_dead(method: Any, *args: Any) -> None:
    """Raises `RayActorError` once the method's actor is dead. Ray ends one soon after it is told to, not at once."""
    while True:
        ray.get(method.remote(*args), timeout=60)
