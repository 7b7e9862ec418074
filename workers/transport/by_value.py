"""The package that pickles classes and functions by value: cloudpickle."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def cloudpickle() -> Any:
    """Return Ray's copy of cloudpickle if this process has imported Ray, because only that copy can pickle Ray's
    references; otherwise the package itself. Nothing here needs Ray."""
    return sys.modules.get("ray.cloudpickle") or importlib.import_module("cloudpickle")
