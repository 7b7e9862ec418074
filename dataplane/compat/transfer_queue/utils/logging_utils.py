"""Loggers under the module name of the original package."""

from __future__ import annotations

import logging
import os

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
