"""A rollout replica that samples, token by token, from the trained model."""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator


def server_name(job: str, replica: int) -> str:
    return f"sampling_server_{job}_{replica}"


class SamplingServer:
    """The model of a replica. All calls run in one event loop; sampling yields to other calls after each token."""

    def __init__(self, model_path: str, response_length: int, replica: int) -> None:
        from transformers import AutoConfig
        from verl.utils.model import get_hf_auto_model_class
        from verl.utils.tokenizer import hf_processor

        torch.set_num_threads(1)
        self._response_length, self._replica = response_length, replica
        of = get_hf_auto_model_class(AutoConfig.from_pretrained(model_path))
        self._model = of.from_pretrained(model_path, dtype=torch.float32).eval()
        self._processor = hf_processor(model_path)  # None for a text model
        # Never sampled: an image placeholder in a response would require an image that the prompt does not have.
        config = self._model.config
        self._placeholders = [] if self._processor is None else [config.image_token_id, config.video_token_id]
        self._steps = 0
        self._running = asyncio.Event()  # set while requests may sample
        self._running.set()
        self._rejecting = False  # whether requests are aborted, instead of waiting, while none may sample
        self._awake = asyncio.Event()

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        **ignored: Any,
    ) -> TokenOutput:
        """Sample one response. After `abort_all_requests` its stop_reason is "aborted", with the tokens so far."""
        if self._rejecting:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._version())
        await self._running.wait()
        await self._awake.wait()
        limit = int(sampling_params.get("max_tokens") or self._response_length)
        seed = int(sampling_params.get("seed", 0)) + len(prompt_ids)
        generator = torch.Generator().manual_seed(seed)
        temperature = float(sampling_params.get("temperature", 1.0))
        ends = self._model.generation_config.eos_token_id
        ids, tokens, logprobs = list(prompt_ids), [], []
        seen = dict(self._processor.image_processor(image_data, return_tensors="pt")) if image_data else {}
        reason = "completed"
        while len(tokens) < limit:
            with torch.no_grad():
                logits = self._model(**self._inputs(ids), **seen).logits[0, -1].float()
            logits[self._placeholders] = -torch.inf
            if temperature > 0:
                scores = torch.log_softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            else:
                scores = torch.log_softmax(logits, dim=-1)
                token = int(scores.argmax())
            ids.append(token)
            tokens.append(token)
            logprobs.append(float(scores[token]))
            if token == ends:
                break
            await asyncio.sleep(0)
            if not self._running.is_set():
                reason = "aborted"
                break
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason=reason, extra_fields=self._version())

    def _inputs(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Return the model inputs of one sequence. A vision model also needs the positions of the image tokens."""
        tokens = torch.tensor([ids])
        if self._processor is None:
            return {"input_ids": tokens}
        of_images = tokens == self._model.config.image_token_id
        return {"input_ids": tokens, "mm_token_type_ids": of_images.long()}

    def _version(self) -> dict[str, Any]:
        return {"global_steps": self._steps}

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        missing, unknown = self._model.load_state_dict(weights, strict=False)
        if unknown or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"weights do not fit the model: missing {missing}, unknown {unknown}")
        self._steps = self._steps if global_steps is None else global_steps
        if folder := os.environ.get("VERL_CPU_DIGESTS"):
            digest = hashlib.sha256()
            for name in sorted(weights):
                digest.update(name.encode())
                digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
            record = {"replica": self._replica, "step": self._steps, "sha256": digest.hexdigest()}
            with open(folder, "a") as digests:
                digests.write(json.dumps(record) + "\n")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._awake.set()

    async def sleep(self) -> None:
        self._awake.clear()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejecting = reject_request
        self._running.clear()

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._running.set()

    async def clear_kv_cache(self) -> None:
        """Do nothing: the server has no cache."""

    async def release_kv_cache(self) -> None:
        """Do nothing: the server has no cache."""

    async def resume_kv_cache(self) -> None:
        """Do nothing: the server has no cache."""

    async def start_profile(self, **kwargs: Any) -> None:
        """Do nothing: there is no profiler."""

    async def stop_profile(self) -> None:
        """Do nothing: there is no profiler."""


class SamplingReplica(RolloutReplica):
    """A replica with one server."""

    async def launch_servers(self) -> None:
        path = self.model_config.path if hasattr(self.model_config, "path") else self.model_config["path"]
        name = server_name(ray.get_runtime_context().get_job_id(), self.replica_rank)
        options = {"name": name, "num_cpus": 0.1, "max_concurrency": self.max_concurrency}
        length = int(self.config.response_length)
        server = ray.remote(SamplingServer).options(**options).remote(str(path), length, self.replica_rank)
        if self.rollout_mode.value != "hybrid":  # replicas with their own weights get no other wake_up
            await server.wake_up.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class ServerAdapter(BaseRollout):
    """The trainer's side: all workers of a replica gather the weights, and the first one sends them to the server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **ignored: Any
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config), model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = rank // size if replica_rank < 0 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    def _handle(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(ray.get_runtime_context().get_job_id(), self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank:
            await self._handle().wake_up.remote(tags)

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._handle().sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **ignored: Any,
    ) -> None:
        gathered = {name: tensor.detach().cpu().clone() async for name, tensor in ensure_async_iterator(weights)}
        if self.is_leader_rank:
            await self._handle().load_weights.remote(gathered, global_steps)
            await self._handle().wake_up.remote()
