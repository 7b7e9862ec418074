"""Finding a service by the name of its controller's actor: addresses "actor:NAME[@NAMESPACE]"."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from dataplane.errors import ServiceUnavailableError

SCHEME = "actor"
ANSWER_TIMEOUT_S = 30.0
"""A busy machine's controller may stand still for longer than ten seconds."""


def actor_address(name: str, namespace: str) -> str:
    """The address of the controller that is the Ray actor `name`."""
    return f"{SCHEME}:{name}@{namespace}"


def resolve_actor(rest: str) -> str:
    """The "host:port" of the controller actor "NAME[@NAMESPACE]", asked of it, up to `ANSWER_TIMEOUT_S`.

    `ServiceUnavailableError` where this process is not in a Ray cluster, or no such actor lives or answers.
    """
    address = f"{SCHEME}:{rest}"
    name, _, namespace = rest.partition("@")
    if not ray.is_initialized():
        raise ServiceUnavailableError(address=address, why="this process is in no Ray cluster; call ray.init() first")
    try:
        controller = ray.get_actor(name, namespace=namespace or None)
        found: str = ray.get(controller.address.remote(), timeout=ANSWER_TIMEOUT_S)
    except ValueError as error:
        why = "no controller actor of that name runs; see workers.launch_service"
        raise ServiceUnavailableError(address=address, why=why) from error
    except RayError as error:
        raise ServiceUnavailableError(address=address, why=f"its controller actor does not answer ({error})") from error
    return found
