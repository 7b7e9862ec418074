"""Find a service by the name of its controller's actor: addresses "actor:NAME[@NAMESPACE]"."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from dataplane.errors import ServiceUnavailableError

SCHEME = "actor"
ANSWER_TIMEOUT_S = 30.0
"""On a busy machine, the controller can be paused for longer than ten seconds."""


def actor_address(name: str, namespace: str) -> str:
    """Return the address of the controller that runs as the Ray actor `name`."""
    return f"{SCHEME}:{name}@{namespace}"


def resolve_actor(name_and_namespace: str) -> str:
    """Request the "host:port" of the controller actor "NAME[@NAMESPACE]". Blocks up to `ANSWER_TIMEOUT_S`.

    `ServiceUnavailableError` if this process is not in a Ray cluster, or if the actor does not run or respond.
    """
    address = f"{SCHEME}:{name_and_namespace}"
    name, _, namespace = name_and_namespace.partition("@")
    if not ray.is_initialized():
        raise ServiceUnavailableError(address=address, why="this process is in no Ray cluster; call ray.init() first")
    try:
        controller = ray.get_actor(name, namespace=namespace or None)
        host_and_port: str = ray.get(controller.address.remote(), timeout=ANSWER_TIMEOUT_S)
    except ValueError as error:
        why = "no controller actor of that name is running; start it with workers.launch_service"
        raise ServiceUnavailableError(address=address, why=why) from error
    except RayError as error:
        raise ServiceUnavailableError(address=address, why=f"its controller actor does not answer ({error})") from error
    return host_and_port
