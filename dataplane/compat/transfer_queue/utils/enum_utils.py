"""Enumerations under the module name of the original package."""

from __future__ import annotations

from enum import Enum


class ExplicitEnum(str, Enum):  # noqa: UP042  # as the original: members are formatted with their class
    """An enumeration whose ValueError for an unknown value names those that there are."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r}: expected one of {[member.value for member in cls]} of {cls.__name__}")


class Role(ExplicitEnum):
    """The parts of a TransferQueue."""

    CONTROLLER = "TransferQueueController"
    STORAGE = "TransferQueueStorage"
    CLIENT = "TransferQueueClient"


class ProductionStatus(ExplicitEnum):
    """The values of `BatchMeta.production_status`."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1
