"""Staleness policies of asynchronous training: limits on the age of training samples, as stateless decisions.

The age of a sample is the trainer's weight version at its use minus the version at the start of its generation.
Policies delay producers instead of discarding finished work: each policy admits new work only as far ahead of the
trainer as its window allows. Eviction only affects samples that took longer than that.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.core.arguments import whole_number
from dataplane.core.schema import WEIGHT_VERSION
from dataplane.data.conditions import Where

TARGET_STEP = "target_step"
"""Tag: the training step that uses the sample, if the policy assigns it at the start."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Progress of a training run. version: version of the trainer's weights, incremented by each step. Sample
    counts: `consumed` by the steps since version 0, `stored` and not yet consumed, `running` at a producer."""

    version: int
    consumed: int = 0
    stored: int = 0
    running: int = 0


class StalenessPolicy(abc.ABC):
    """Decides how many samples producers may start, which samples a step uses, and which are evicted.

    batch_size: samples per training step. window: maximum age of a sample in versions; 0 is on-policy.
    """

    def __init__(self, *, batch_size: int, window: int) -> None:
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.window = whole_number("window", window, 0)

    def headroom(self, flow: Flow) -> int:
        """Return how many more samples producers may start. Samples started now are used by a step that starts at
        most `window` versions from now."""
        # The samples of all steps up to the one that starts `window` versions from now, since version 0.
        needed = (flow.version + self.window + 1) * self.batch_size
        return max(needed - flow.consumed - flow.stored - flow.running, 0)

    @abc.abstractmethod
    def claims(self, version: int) -> Sequence[Where]:
        """Return the conditions for the samples of a step at `version`, in order of preference. The step claims as
        many samples as possible for each condition before the next one, and waits only on the last."""

    @abc.abstractmethod
    def evicts(self, version: int) -> Where | None:
        """Return the condition for samples that no step from `version` on will use; None if there are no such
        samples."""

    def aborts(self, begun_at: int, version: int) -> bool:
        """Return whether work that started at version `begun_at` should be aborted at `version`: it is older than the
        window, and the policy evicts such samples."""
        return self.evicts(version) is not None and begun_at < version - self.window

    def target(self, position: int) -> int | None:
        """Return the step of the sample that was started at position `position` (not counting rolled-back samples);
        None for any step."""
        del position
        return None


class Windowed(StalenessPolicy):
    """Use samples within the window, those that finished first before the others. Older samples are evicted."""

    def claims(self, version: int) -> Sequence[Where]:
        return [((WEIGHT_VERSION, ">=", version - self.window),)]

    def evicts(self, version: int) -> Where | None:
        return ((WEIGHT_VERSION, "<", version - self.window),)


class ReadyFirst(StalenessPolicy):
    """Use samples in the order in which they finished, regardless of age. Nothing is evicted; only admission limits
    the lag."""

    def claims(self, version: int) -> Sequence[Where]:
        return [()]

    def evicts(self, version: int) -> Where | None:
        return None


class WeightFifo(StalenessPolicy):
    """Use samples of the oldest weights within the window first, so that they do not expire while newer ones are
    used."""

    def claims(self, version: int) -> Sequence[Where]:
        oldest = version - self.window
        # One version at a time; the last condition, on which the step waits, also covers the current version.
        by_version: list[Where] = [((WEIGHT_VERSION, "==", begun),) for begun in range(oldest, version)]
        return [*by_version, ((WEIGHT_VERSION, ">=", oldest),)]

    def evicts(self, version: int) -> Where | None:
        return ((WEIGHT_VERSION, "<", version - self.window),)


class InOrder(StalenessPolicy):
    """Assign each sample to a step at its start; a step waits for all of its samples. Nothing is evicted, and runs
    that differ only in timing train on the same batches."""

    def claims(self, version: int) -> Sequence[Where]:
        return [((TARGET_STEP, "==", version),)]

    def evicts(self, version: int) -> Where | None:
        return None

    def target(self, position: int) -> int | None:
        return position // self.batch_size
