"""verl's replay buffer, with each batch in the order of its keys: `trainer.v1.sampler.custom_sampler` names it. The
queues list keys in orders of their own, and sums of floating-point numbers depend on it."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def in_key_order(batch: Any) -> Any:
    batch.reorder(sorted(range(len(batch.keys)), key=lambda place: batch.keys[place]))
    return batch


class OrderedReplayBuffer(ReplayBuffer):
    """For `trainer_mode=sync`."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(*args, **kwargs)
        return in_key_order(batch), metrics


class OrderedReplayBufferAsync(ReplayBufferAsync):
    """For the asynchronous modes."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(*args, **kwargs)
        return in_key_order(batch), metrics
