"""Worker classes for tests of how workers start. They import little, so that groups of them start fast."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import ray


class Starter:
    """Says where it is and what it was started with."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def what_it_was_told(self) -> dict[str, Any]:
        return self.told

    def where(self) -> tuple[str, int, int]:
        """(node, NODE_RANK, LOCAL_RANK)."""
        return ray.get_runtime_context().get_node_id(), int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])

    def resources(self) -> dict[str, float]:
        return dict(ray.get_runtime_context().get_assigned_resources())

    def runtime_env(self) -> dict[str, Any]:
        return dict(ray.get_runtime_context().runtime_env)

    def serve_on(self, port: int) -> int:
        """Listen on a port until this process ends; returns it."""
        self.server = socket.create_server(("", port))
        return int(self.server.getsockname()[1])


class Configured(Starter):
    """Asks for all that a worker class can ask for."""

    _default_options = {  # noqa: RUF012 (Ray's own attribute of that name is a dict)
        "max_concurrency": 2,
        "runtime_env": {"env_vars": {"A_CLASS": "class", "A_DRIVER": "class"}},
    }

    @staticmethod
    def configure_worker(num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int) -> Any:
        return (
            {"num_cpus": 0},
            {"A_WORKER": "worker", "RANK": "77"},
            {"bundle_indices": bundle_indices, "num_gpus": num_gpus, "num_gpus_per_node": num_gpus_per_node},
            {"config": {"setup_timeout_seconds": 123}, "env_vars": {"A_RUNTIME": "runtime"}},
        )


class Tied(Starter):
    @classmethod
    def configure_worker(cls, num_gpus: float, bundle_indices: tuple[int, list[int]] | None) -> Any:
        return None, None, {"bundle_indices": bundle_indices}


class OpenMinded(Starter):
    @staticmethod
    def configure_worker(**asked: Any) -> Any:
        return {}, {}, {"asked": sorted(asked)}


class Misconfigured:
    @staticmethod
    def configure_worker(num_gpus: float, bundle_indices: tuple[int, list[int]] | None) -> Any:
        return {}, {}


@ray.remote(num_cpus=0, concurrency_groups={"io": 1}, runtime_env={"env_vars": {"A_DECORATOR": "decorator"}})
class Decorated(Starter):
    pass


class Meeting(Starter):
    """Its constructor waits at a FIFO until the other worker's is there too."""

    def __init__(self, fifo: str) -> None:
        super().__init__()
        with open(fifo, "w" if os.environ["RANK"] == "0" else "r"):
            pass


class Refused(Exception):
    """Carries a fact."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Refusing:
    """Its constructor raises on one rank and waits for ever at a FIFO on the others."""

    def __init__(self, rank: int, fifo: str) -> None:
        if os.environ["RANK"] == str(rank):
            raise Refused(7)
        with open(fifo):
            pass


class Signalling:
    """Its constructor signals a process, then waits for ever at a FIFO."""

    def __init__(self, process: int, fifo: str) -> None:
        os.kill(process, signal.SIGUSR1)
        with open(fifo):
            pass


class Dying:
    def __init__(self) -> None:
        os._exit(3)


class Closed(Exception):
    """Cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("closed")


class Unspeakable:
    def __init__(self) -> None:
        raise Closed("what it was")
