"""Enumerations under the module name of the original package."""

from __future__ import annotations

from enum import Enum


class ExplicitEnum(str, Enum):  # noqa: UP042  # as in the original: str() of a member includes the class name
    """An enumeration whose ValueError for an unknown value lists the valid values."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r}: expected one of {[member.value for member in cls]} of {cls.__name__}")


class Role(ExplicitEnum):
    """The components of a TransferQueue."""

    CONTROLLER = "TransferQueueController"
    STORAGE = "TransferQueueStorage"
    CLIENT = "TransferQueueClient"


class ProductionStatus(ExplicitEnum):
    """The values of `BatchMeta.production_status`."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1
