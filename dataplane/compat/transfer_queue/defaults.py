"""The settings of the original package with their defaults (the same as in config.yaml), and warnings for settings that
this package ignores."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

BACKENDS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")

_BACKEND: dict[str, Any] = {
    "storage_backend": "SimpleStorage",
    "SimpleStorage": {
        "total_storage_size": None,
        "num_data_storage_units": 2,
        "required_node_resource": None,
        "zmq_info": None,
        "ssd_offload": {
            "enabled": False,
            "path": None,
            "threshold_bytes": 1 << 20,
            "glibc_mmap_threshold_bytes": 1 << 20,
        },
    },
    "MooncakeStore": {
        "auto_init": True,
        "metadata_server": "localhost:50050",
        "master_server_address": "localhost:50051",
        "local_hostname": "",
        "protocol": "tcp",
        "global_segment_size": 4 << 30,
        "local_buffer_size": 1 << 30,
        "device_name": "",
        "hard_pin": None,
        "offload": {
            "enabled": False,
            "file_storage_path": "/tmp/mooncake_offload",
            "local_buffer_size_bytes": 2 << 30,
            "use_uring": False,
            "heartbeat_interval_seconds": 2,
            "client_port": 42052,
            "eviction_high_watermark_ratio": 0.9,
            "eviction_ratio": 0.1,
        },
        "use_gdr": False,
        "gdr_staging_buffer_mb": 1024,
    },
    "Yuanrong": {
        "auto_init": True,
        "worker_port": 31501,
        "metastore_port": 2379,
        "enable_yr_npu_transport": False,
        "ds_max_workers": 1,
        "enable_rdma": False,
        "ucx_env_vars": {},
        "worker_args": "--shared_memory_size_mb 8192",
    },
    "RayStore": None,
}

_DEFAULTS: dict[str, Any] = {
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None, "name": None},
    "backend": _BACKEND,
    "strict_reads": False,
    "objects": None,
    "dataplane": {},
}

_REPLACEMENTS = {
    "backend.storage_backend": "samples are in shared memory of this project's storage units",
    "backend.SimpleStorage.total_storage_size": "capacity is in bytes, dataplane.capacity_bytes; a put waits for space",
    "backend.SimpleStorage.num_data_storage_units": "every node has a storage unit; without Ray, dataplane.units",
    "backend.SimpleStorage.required_node_resource": "every node has a storage unit",
    "backend.SimpleStorage.ssd_offload": "dataplane.arena_dir may be a directory on a disk",
    "backend.MooncakeStore.protocol": "dataplane.bulk_transport='mooncake' with dataplane.mooncake_protocol",
    "backend.MooncakeStore.device_name": "dataplane.bulk_transport='mooncake' with dataplane.mooncake_device",
    "backend.MooncakeStore.global_segment_size": "dataplane.capacity_bytes is the size of each storage unit",
}
"""For ignored settings, by path: what replaces them, as a text for a warning."""


def defaults() -> dict[str, Any]:
    """Return a copy of all settings with their default values."""
    return copy.deepcopy(_DEFAULTS)


def warn_of_unknown(conf: Mapping[str, Any]) -> None:
    """Warn once about each unknown section, and about each unknown setting of `controller` and
    `metrics`. They are often misspelled; the original ignores them without a warning."""
    known = {**_DEFAULTS, "metrics": {**_DEFAULTS["metrics"], "endpoint": None}}  # `init` adds it
    _warn_of_names(conf, known, what="section", prefix="")
    for section in ("controller", "metrics"):
        _warn_of_names(conf.get(section) or {}, known[section], "setting", prefix=f"{section}.")


def _warn_of_names(
    given: Mapping[str, Any],
    known: Mapping[str, Any],
    what: str,
    prefix: str,
) -> None:
    """Warn about the names that are not known. what: what they name. prefix: precedes each name."""
    for name in given:
        if name not in known:
            known_names = ", ".join(f"{prefix}{each}" for each in known)
            warn_once(f"{prefix}{name} is not used: unknown {what}; expected one of {known_names}")


def warn_of_unused(conf: Mapping[str, Any]) -> None:
    """Warn once about each ignored setting of `backend` that differs from its default, and name its replacement.
    Settings of a backend that is not selected get no warning, because the original ignores them, too."""
    backend = conf.get("backend") or {}
    selected = backend.get("storage_backend") or _BACKEND["storage_backend"]
    # The settings of the selected backend, and those of no backend.
    given = {name: value for name, value in backend.items() if name == selected or name not in BACKENDS}
    for path, value in _differences(given, _BACKEND, path="backend"):
        if not path.startswith("backend.SimpleStorage.zmq_info"):  # an address, not a choice of the caller
            warn_once(f"{path}={value!r} is not used: {_replacement_of(path)}")


def _differences(given: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each given setting that differs from its default. None counts as not
    given. path: that of `given`."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            default_value = default.get(name) if isinstance(default, Mapping) else None
            yield from _differences(value, default_value, f"{path}.{name}")
    elif given is not None and given != default:
        yield path, given


def _replacement_of(path: str) -> str:
    """Return what replaces the setting at this path, or at the nearest path above it that has a replacement."""
    while path and path not in _REPLACEMENTS:
        path = path.rpartition(".")[0]
    return _REPLACEMENTS.get(path, "configure the storage units of this project in `dataplane`")


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log the warning, unless it is among the last 256 that this process logged."""
    log.warning("%s", text)
