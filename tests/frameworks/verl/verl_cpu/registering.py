"""What this package enters into verl's registries."""

import copy
from typing import Any

ROLLOUT = "transformers"  # the value of actor_rollout_ref.rollout.name
HEAD_SEED = 7


def rollouts() -> None:
    """The rollout that samples with transformers: the server's replica, and the trainer's side of it."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def replica() -> type[Any]:
        from verl_cpu.rollout import SamplingReplica

        return SamplingReplica

    RolloutReplicaRegistry.register(ROLLOUT, replica)
    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl_cpu.rollout.ServerAdapter"


def engines() -> None:
    """verl's own FSDP engines, for the device `cpu`."""
    import torch
    from transformers import AutoModelForTokenClassification
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    backends = ["fsdp", "fsdp2"]

    class OnCpu:
        """Parameters stay where they are: offloading them pins memory, which takes a GPU."""

        engine_config: Any

        def _build_fsdp_module(self, module: Any) -> Any:
            config = self.engine_config
            self.engine_config = copy.copy(config)
            object.__setattr__(self.engine_config, "forward_only", False)  # it is frozen
            try:
                return super()._build_fsdp_module(module)  # type: ignore[misc]
            finally:
                self.engine_config = config

    @EngineRegistry.register(model_type="language_model", backend=backends, device="cpu")
    class LanguageModel(OnCpu, FSDPEngineWithLMHead):
        """The policy."""

    @EngineRegistry.register(model_type="value_model", backend=backends, device="cpu")
    class ValueModel(OnCpu, FSDPEngineWithValueHead):
        """The critic, whose head starts from the same numbers in each run. verl's own asks for FlashAttention whatever
        is configured."""

        def _build_module(self) -> Any:
            torch.manual_seed(HEAD_SEED)
            config = self.model_config.hf_config
            config.num_labels, config.classifier_dropout = 1, 0.0
            return AutoModelForTokenClassification.from_pretrained(
                self.model_config.local_path, config=config, dtype=torch.float32, attn_implementation="eager"
            )
