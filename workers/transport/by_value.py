"""The package that pickles classes and functions by value: cloudpickle."""

from __future__ import annotations

import sys
from typing import Any


def cloudpickle() -> Any:
    """Return Ray's copy of cloudpickle if this process has imported Ray, because only that copy can pickle Ray's
    references; otherwise the package itself. Nothing here needs Ray."""
    of_ray = sys.modules.get("ray.cloudpickle")
    if of_ray is not None:
        return of_ray
    import cloudpickle as package  # type: ignore[import-untyped]  # noqa: PLC0415  # without Ray only

    return package
