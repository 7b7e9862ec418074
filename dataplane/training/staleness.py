"""How old the samples a trainer uses may be: policies of asynchronous training, as decisions without state.

The age of a sample is the trainer's weight version when it is used less the version its generation began with.
Producers are held back before they begin rather than robbed of what they did: each policy admits new work only as far
ahead of the trainer as its window allows, and what is evicted all the same is what took longer than that.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.core.schema import WEIGHT_VERSION
from dataplane.data.conditions import Where

TARGET_STEP = "target_step"
"""Tag: the training step a sample is meant for, where the policy decides that when it begins."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Where a training run stands. version: of the trainer's weights, one more after each step. Samples, counted:
    `consumed` by the steps since version 0, `stored` and not yet consumed, `running` with a producer."""

    version: int
    consumed: int = 0
    stored: int = 0
    running: int = 0


class StalenessPolicy(abc.ABC):
    """batch_size: samples of one training step. window: how many versions old a sample may be; 0 is on-policy."""

    def __init__(self, *, batch_size: int, window: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a step takes at least one sample")
        if window < 0:
            raise ValueError(f"window={window}: samples cannot be newer than the weights")
        self.batch_size = batch_size
        self.window = window

    def headroom(self, flow: Flow) -> int:
        """How many more samples producers may begin. What they begin now is wanted by a step that starts `window`
        versions from now at the latest."""
        wanted = (flow.version + self.window + 1) * self.batch_size
        return max(wanted - flow.consumed - flow.stored - flow.running, 0)

    @abc.abstractmethod
    def claims(self, version: int) -> Sequence[Where]:
        """What a step at `version` takes, in order of preference: each is claimed as far as it goes before the next;
        the last is what it waits for."""

    @abc.abstractmethod
    def evicts(self, version: int) -> Where | None:
        """What no step will take from `version` on; None: everything will be."""

    def aborts(self, begun_at: int, version: int) -> bool:
        """Whether work begun at `begun_at` is not worth going on with at `version`."""
        return self.evicts(version) is not None and begun_at < version - self.window

    def target(self, place: int) -> int | None:
        """The step that the sample begun as number `place` (of those not rolled back) is for; None: whichever."""
        del place
        return None


class Windowed(StalenessPolicy):
    """Samples within the window, those that finished first before the others; older ones are evicted."""

    def claims(self, version: int) -> Sequence[Where]:
        return [((WEIGHT_VERSION, ">=", version - self.window),)]

    def evicts(self, version: int) -> Where | None:
        return ((WEIGHT_VERSION, "<", version - self.window),)


class ReadyFirst(StalenessPolicy):
    """Whatever finished first, whatever its age: nothing is evicted, only admission bounds how far producers lag."""

    def claims(self, version: int) -> Sequence[Where]:
        return [()]

    def evicts(self, version: int) -> Where | None:
        return None


class WeightFifo(StalenessPolicy):
    """Samples of the oldest weights within the window first, so that none ages while newer ones are used."""

    def claims(self, version: int) -> Sequence[Where]:
        oldest = version - self.window
        by_version: list[Where] = [((WEIGHT_VERSION, "==", begun),) for begun in range(oldest, version)]
        return [*by_version, ((WEIGHT_VERSION, ">=", oldest),)]

    def evicts(self, version: int) -> Where | None:
        return ((WEIGHT_VERSION, "<", version - self.window),)


class InOrder(StalenessPolicy):
    """Each sample is meant for a step from the beginning, and a step waits for all of its own: nothing is evicted, and
    runs that differ only in timing train on the same batches."""

    def claims(self, version: int) -> Sequence[Where]:
        return [((TARGET_STEP, "==", version),)]

    def evicts(self, version: int) -> Where | None:
        return None

    def target(self, place: int) -> int | None:
        return place // self.batch_size
