"""Merged options of Ray actors, and the part of this process's environment that workers inherit. No Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RAY_OWN = ("RAY_", "__RAY")
"""Beginnings of the names of variables that Ray sets for itself."""
_RAY_SETTINGS = ("RAY_EXPERIMENTAL_NOSET_",)
"""Beginnings of the names among them that are a user's settings, which workers inherit."""
_SET_PER_WORKER = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ONEAPI_DEVICE_SELECTOR",
        "HABANA_VISIBLE_MODULES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that have another value in each worker."""
Path = tuple[str, ...]
"""The keys on the way to an option: its name, or ("runtime_env", "env_vars", NAME)."""


@dataclass(frozen=True)
class Layer:
    """Actor options from one origin ("the driver's environment"). why: the reason to log if it overrides a lower
    layer."""

    origin: str
    options: Mapping[str, Any]
    why: str


def driver_environment() -> dict[str, str]:
    """Return the part of this process's environment that workers inherit, without variables that Ray sets for itself
    or per worker.

    Values that contain "$" or are not valid text are left out too, because Ray would change them.
    """
    return {name: value for name, value in os.environ.items() if _is_inherited(name) and _is_plain(value)}


def _is_inherited(name: str) -> bool:
    """Return whether workers inherit the variable: not if Ray sets it for itself or for each worker."""
    if name.startswith(_RAY_OWN):
        return name.startswith(_RAY_SETTINGS)
    return name not in _SET_PER_WORKER


def _is_plain(value: str) -> bool:
    return "$" not in value and value.encode(errors="ignore").decode() == value


def layered(layers: Sequence[Layer]) -> tuple[dict[str, Any], list[str]]:
    """Merge the options of all layers; later layers override earlier ones. Return the options, and one message per
    pair of layers of which one overrides the other, with the reason.

    `runtime_env` and its `env_vars` are merged key by key. An equal value, or any value over None, does not count as
    an override. Messages omit the values of environment variables, which may be secret. Layers are not modified.
    """
    values: dict[Path, tuple[Any, Layer]] = {}
    # The changes, by (origin of the upper layer, origin of the lower layer, reason).
    overridden: dict[tuple[str, str, str], list[str]] = {}
    for layer in layers:
        for path, value in _flatten(layer.options):
            if path in values and values[path][0] is not None and values[path][0] != value:
                lower_value, lower_layer = values[path]
                is_variable = len(path) == 3  # ("runtime_env", "env_vars", NAME)
                change = f"variable {path[-1]}" if is_variable else f"{path[-1]}={lower_value!r} with {value!r}"
                overridden.setdefault((layer.origin, lower_layer.origin, layer.why), []).append(change)
            values[path] = (value, layer)
    sentences = [
        f"{upper} overrides {', '.join(changes)} of {lower}: {why}"
        for (upper, lower, why), changes in overridden.items()
    ]
    return _nest((path, value) for path, (value, _) in values.items()), sentences


def _flatten(options: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each option; `runtime_env` and its `env_vars` are yielded key by key."""
    for name, value in options.items():
        path = (*prefix, name)
        if path in (("runtime_env",), ("runtime_env", "env_vars")):
            yield from _flatten(value or {}, path)
        else:
            yield path, value


def _nest(values: Iterator[tuple[Path, Any]]) -> dict[str, Any]:
    """Return the nested options of these paths and values, the inverse of `_flatten`."""
    result: dict[str, Any] = {}
    for path, value in values:
        target = result
        for name in path[:-1]:
            target = target.setdefault(name, {})
        target[path[-1]] = value
    return result
