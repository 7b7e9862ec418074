"""Helpers of the original package that its users import: loggers and enumerations."""

from __future__ import annotations

import logging
import os
from enum import Enum

_FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """Return the logger of this name at the level TQ_LOGGING_LEVEL, by default `default_level`. It writes to standard
    error if the program has not configured logging."""
    logger = logging.getLogger(name)
    logger.setLevel(os.getenv("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger


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
