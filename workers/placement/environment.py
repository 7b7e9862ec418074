"""Merged options of Ray actors, and the part of this process's environment that workers inherit. No Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RAY_OWN = ("RAY_", "__RAY")
_RAY_SETTINGS = ("RAY_EXPERIMENTAL_NOSET_",)
_SET_PER_WORKER = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ONEAPI_DEVICE_SELECTOR",
        "HABANA_VISIBLE_MODULES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "PYTEST_CURRENT_TEST",
    }
)
Path = tuple[str, ...]


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
    return {name: value for name, value in os.environ.items() if _passed_on(name) and _is_plain(value)}


def _passed_on(name: str) -> bool:
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
    found: dict[Path, tuple[Any, Layer]] = {}
    overridden: dict[tuple[str, str, str], list[str]] = {}
    for layer in layers:
        for path, value in _flat(layer.options):
            if path in found and found[path][0] is not None and found[path][0] != value:
                lower, below = found[path]
                what = f"variable {path[-1]}" if len(path) == 3 else f"{path[-1]}={lower!r} with {value!r}"
                overridden.setdefault((layer.origin, below.origin, layer.why), []).append(what)
            found[path] = (value, layer)
    sentences = [
        f"{upper} overrides {', '.join(what)} of {below}: {why}" for (upper, below, why), what in overridden.items()
    ]
    return _nested((path, value) for path, (value, _) in found.items()), sentences


def _flat(options: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in options.items():
        path = (*above, name)
        if path in (("runtime_env",), ("runtime_env", "env_vars")):
            yield from _flat(value or {}, path)
        else:
            yield path, value


def _nested(values: Iterator[tuple[Path, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in values:
        inner = result
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return result
