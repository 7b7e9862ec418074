"""A checkpoint engine that moves weights by a Ray actor, for `separate_async`:
`checkpoint_engine.custom_backend_module` names it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngine

BACKEND = "ray_actor"
Weights = dict[str, torch.Tensor]


class Mailbox:
    """Keeps one update until the trainer clears it."""

    def __init__(self) -> None:
        self._full = asyncio.Event()
        self._weights: Weights = {}

    async def put(self, weights: Weights) -> None:
        self._weights = weights
        self._full.set()

    async def get(self) -> Weights:
        await self._full.wait()
        return self._weights

    async def clear(self) -> None:
        self._full.clear()
        self._weights = {}


@CheckpointEngineRegistry.register(BACKEND)
class RayActorEngine(CheckpointEngine):
    """The trainer's first rank puts what all ranks gather; each rollout worker gets it."""

    def __init__(self, bucket_size: int, is_master: bool = False, **ignored: Any) -> None:
        self._is_master = is_master
        self._mailbox: Any = None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {"side": ["actor"] * actor_wg_world_size}, {"side": ["rollout"] * rollout_world_size}

    def init_process_group(self, **kwargs: Any) -> None:
        name = f"weights_{ray.get_runtime_context().get_job_id()}"
        options = {"name": name, "get_if_exists": True, "num_cpus": 0, "lifetime": "detached"}
        self._mailbox = ray.remote(Mailbox).options(**options).remote()

    def finalize(self) -> None:
        if self._is_master:
            ray.get(self._mailbox.clear.remote())

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        gathered = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if self._is_master:
            await self._mailbox.put.remote(gathered)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, tensor in (await self._mailbox.get.remote()).items():
            yield name, tensor
