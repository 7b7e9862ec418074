"""The settings of `init`, and the subset that the service stores for all its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataplane.compat.switch import VARIABLE, replaced
from dataplane.compat.transfer_queue.defaults import (
    BACKENDS,
    defaults,
    warn_of_unknown,
    warn_of_unused,
    warn_once,
)
from dataplane.compat.transfer_queue.fetching import Sampling
from dataplane.compat.transfer_queue.samplers import NAMED, BaseSampler, DrawingSampler
from dataplane.config import DataPlaneConfig
from dataplane.core.durations import seconds

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
        except at a service with neither a token nor TLS.
        """
        if self.objects is not None:
            return str(self.objects)
        if not replaced(*SWITCHES):
            return "refuse"
        config = found.with_environment() if found is not None else None
        # Unpickling runs code, so it requires a service that outsiders cannot write to.
        if config is not None and config.tls is None and config.secret() is None:
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
