"""The settings of `init` with their defaults (the same as in config.yaml), warnings for settings that this
package ignores, and the subset that the service stores for all its processes."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataplane.compat.switch import VARIABLE, replaced
from dataplane.compat.transfer_queue.sampler import (
    NAMED,
    BaseSampler,
    DrawingSampler,
    SequentialSampler,
)
from dataplane.config import DataPlaneConfig
from dataplane.core.durations import seconds

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


_NAME = re.compile(r"[A-Za-z0-9._-]+")
SWITCHES = ("transfer_queue", "nemo_rl.data_plane.adapters.transfer_queue")
"""Modules of the switch's table that this adapter replaces."""


class Settings(dict[str, Any]):
    """A configuration dict whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"configuration has no entry {name!r}; its entries are {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def of(cls, conf: Mapping[str, Any] | None) -> Settings:
        """Merge `conf` (a mapping, which can be OmegaConf's) into the defaults. TypeError for other types, including
        entries that must be mappings or bools. ValueError for a storage backend that the original does not have."""
        if conf is not None and not isinstance(conf, Mapping):
            raise TypeError(f"conf={conf!r}: expected a mapping of settings or None, got {type(conf).__name__}")
        settings = cls(_merged(defaults(), conf or {}))
        for section in ("controller", "metrics", "backend"):
            _check_type(section, settings[section], Mapping, "a mapping of settings")
        for path, value in (
            ("strict_reads", settings.strict_reads),
            ("controller.polling_mode", settings.controller.polling_mode),
            ("metrics.enabled", settings.metrics.enabled),
        ):
            _check_type(path, value, bool, "True or False")
        backend = settings.backend.storage_backend
        if backend not in BACKENDS:
            raise ValueError(f"backend.storage_backend={backend!r}: expected one of {', '.join(BACKENDS)}")
        warn_of_unknown(conf or {})
        warn_of_unused(conf or {})
        return settings

    def service(self) -> DataPlaneConfig:
        """Return the configuration for starting a service. With `metrics.enabled` the service has an HTTP port."""
        config = self._dataplane_config()
        if not self.metrics.get("enabled"):
            return config
        # The port 0 is any free one.
        port = config.http_port if config.http_port is not None else int(self.metrics.get("port") or 0)
        # Without a configured token, a Ray job can generate one. No scraper knows it, so /metrics must not require it.
        no_token = config.with_environment().secret() is None
        return replace(config, http_port=port, open_metrics=config.open_metrics or no_token)

    def address(self) -> DataPlaneConfig | None:
        """Return the configuration of the service whose address these settings have, or None."""
        # `init` returns settings with the address here. It takes precedence over `dataplane.address`.
        controller_info = self.controller.zmq_info
        if controller_info is not None:
            return attach_config(controller_info)
        config = self._dataplane_config()
        return config if config.address is not None else None

    def _dataplane_config(self) -> DataPlaneConfig:
        """Return the settings in `dataplane`, with the `objects` of these settings unless that is unset or "refuse"."""
        config = DataPlaneConfig.of(self.dataplane)
        return config if self.objects in (None, "refuse") else replace(config, objects=self.objects)

    def objects_with(self, found: DataPlaneConfig | None) -> str:
        """Return how to treat objects that no column can store, "refuse" or "pickle", at the service `found` (None: one
        to be started).

        The default is "refuse". A job that is switched relies on the original's pickles, so its default is "pickle",
        except at a service without a token.
        """
        if self.objects is not None:
            return str(self.objects)
        if not replaced(*SWITCHES):
            return "refuse"
        config = found.with_environment() if found is not None else None
        # Unpickling runs code, so it requires a service that outsiders cannot write to.
        if config is not None and config.secret() is None:
            return "refuse"
        warn_once(
            f"{VARIABLE} is set, so objects that no column can store are pickled; "
            "pass init({'objects': 'refuse'}) to reject them"
        )
        return "pickle"

    def shared_name(self) -> str | None:
        """Return the name under which several jobs share a service, or None if each job has its own. ValueError for an
        invalid name."""
        name = self.controller.name
        if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
            raise ValueError(f"controller.name={name!r}: expected letters, digits, '.', '_' and '-', or None")
        return name


def attach_config(controller_info: Any) -> DataPlaneConfig:
    """Return the configuration that attaches to a service, from an address, a mapping of settings or a
    `DataPlaneConfig`. ValueError for None, TypeError for other types."""
    if controller_info is None:
        raise ValueError("controller_info is None: pass a service's address, or the controller.zmq_info of init()")
    if isinstance(controller_info, str):
        return DataPlaneConfig(address=controller_info).with_environment()
    if isinstance(controller_info, DataPlaneConfig | Mapping):
        return DataPlaneConfig.of(controller_info).with_environment()
    raise TypeError(
        f"controller_info: expected an address, settings or a DataPlaneConfig, got {type(controller_info).__name__}"
    )


def _check_type(path: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{path}={value!r}: expected {expected}, got {type(value).__name__}")


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> Settings:
    """Return a copy of `base` with the entries of `overrides`. Mappings are merged recursively and become Settings."""
    # A merge with {} copies a section of `base`.
    merged = Settings({key: _merged(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()})
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            base_section = merged.get(key)
            merged[key] = _merged(base_section if isinstance(base_section, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


# --- settings for all processes


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `get_meta` samples. wait_s: how long it waits for enough samples. polling: return an empty meta instead of
    waiting."""

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling: bool = False
    wait_s: float = 5.0


def sampler_of(setting: Any) -> BaseSampler:
    """Return the sampler for an instance, a class or a name. ValueError for an unknown name."""
    if isinstance(setting, BaseSampler):
        return setting
    if isinstance(setting, type) and issubclass(setting, BaseSampler):
        return setting()
    if isinstance(setting, str) and setting in NAMED:
        return NAMED[setting]()
    raise ValueError(
        f"controller.sampler={setting!r} was not found: expected a BaseSampler or one of {', '.join(NAMED)}"
    )


def settings_to_store(settings: Settings) -> dict[str, Any]:
    """Return the settings that the service stores for all processes. They include settings that the original reads from
    the environment: the longer of two waiting times of `get_meta`, and the number of samples that every partition must
    have before it counts as consumed. ValueError for a variable that is not an integer."""
    sampler = sampler_of(settings.controller.sampler)
    check_interval_s = _int_from_environment("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", 5)
    wait_s = max(_int_from_environment("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1), check_interval_s)
    return {
        "sampler": _name_of(sampler),
        "arguments": _arguments_of(sampler),
        "polling": bool(settings.controller.polling_mode),
        "wait_s": seconds("TQ_CONTROLLER_GET_METADATA_TIMEOUT", wait_s),
        "expected": _int_from_environment("TQ_PRE_ALLOC_SAMPLE_NUM", 1),
        "strict_reads": bool(settings.strict_reads),
        "objects": settings.objects,
    }


def _int_from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: expected an integer") from None


def sampling_of(stored: Mapping[str, Any] | None, local_sampler: BaseSampler | None) -> Sampling:
    """Return how to sample, by the settings that the service stores (None without any). local_sampler: the sampler that
    was passed to `init` in this process. ValueError if the service uses a custom class and `local_sampler` is not of
    this class."""
    if stored is None:
        return Sampling() if local_sampler is None else Sampling(sampler=local_sampler)
    sampling = Sampling(polling=bool(stored["polling"]), wait_s=float(stored["wait_s"]))
    name = stored["sampler"]
    if name in NAMED:
        return replace(sampling, sampler=NAMED[name](**stored["arguments"]))
    if local_sampler is None or _name_of(local_sampler) != name:
        raise ValueError(f"the service was started with the sampler {name}: pass it to init() in this process, too")
    return replace(sampling, sampler=local_sampler)


def _name_of(sampler: BaseSampler) -> str:
    """Return the key of the sampler's class in `NAMED`, or the full name of a custom class."""
    kind = type(sampler)
    return kind.__name__ if kind in NAMED.values() else f"{kind.__module__}.{kind.__qualname__}"


def _arguments_of(sampler: BaseSampler) -> dict[str, Any]:
    """Return the arguments with which other processes create a sampler of `NAMED`: its public attributes. Empty for a
    custom class."""
    if not isinstance(sampler, DrawingSampler) or type(sampler) not in NAMED.values():
        return {}
    return {name: value for name, value in vars(sampler).items() if not name.startswith("_")}
