"""Create the client that a NeMo-RL configuration describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dataplane.compat.nemo_rl.client import DataPlaneClient
from dataplane.compat.switch import replaced
from dataplane.compat.transfer_queue.defaults import warn_once
from dataplane.compat.transfer_queue.session import Session, open_session
from dataplane.compat.transfer_queue.settings import Settings

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("transfer_queue", "rl_dataplane")
ADAPTER = "nemo_rl.data_plane.adapters.transfer_queue"
"""The module of NeMo-RL that the switch can replace."""
_CAPACITY = "dataplane.capacity_bytes is the size of each storage unit"
_UNITS = "every node has a storage unit; without Ray, dataplane.units"
_TRANSPORT = "dataplane.bulk_transport='mooncake' uses Mooncake between hosts, without such buffers"
BLOCKS: dict[str, dict[str, str]] = {
    "simple": {"storage_capacity": _CAPACITY, "num_storage_units": _UNITS},
    "mooncake_cpu": {
        "global_segment_size": _CAPACITY,
        "local_buffer_size": _TRANSPORT,
        "reuse_registered_buffers": _TRANSPORT,
        "staging_buffer_size": _TRANSPORT,
    },
}
"""Per backend, the settings of its block, none of which has an effect, and what replaces each."""
WITHOUT_BLOCK: dict[str, str] = {
    "storage_capacity": _CAPACITY,
    "num_storage_units": _UNITS,
    "global_segment_size": _CAPACITY,
    "local_buffer_size": _TRANSPORT,
    "claim_meta_poll_interval_s": "claims wait on the service without polling",
}
"""The settings outside of the blocks that have no effect, and what replaces each. All but the last
are also settings of the blocks."""


def build_data_plane_client(cfg: Mapping[str, Any] | None, *, bootstrap: bool = True) -> DataPlaneClient:
    """Return a client of the service that `cfg` describes.

    bootstrap: True in the driver, which starts a service if none is found. False in a worker, which only attaches;
    `NotInitializedError` (a RuntimeError) without a service. `dataplane.compat.transfer_queue.init` documents where a
    service is found and started.

    cfg: `enabled` must be true; `impl` is "transfer_queue" (for existing configurations) or "rl_dataplane";
    `controller_address` is the service's address, or `controller_name` its name (`controller.name` of `init`);
    `ack_timeout_ms` is the timeout of a command; `dataplane` has further settings of `DataPlaneConfig`; `objects` is
    that of `init`, by default "pickle" if the switch replaces NeMo-RL's adapter by this package.

    The settings of the block named by `backend` (`simple` or `mooncake_cpu`), the same settings
    without a block, `claim_meta_poll_interval_s` and `observability` have no effect; the driver
    logs one warning for each that is given. As in NeMo-RL, the block of another backend is ignored.

    ValueError for a configuration that is not enabled, for an `impl` or `backend` that NeMo-RL does
    not have, and for an unknown setting in either block; TypeError for a block that is no mapping.
    """
    if cfg is None or not cfg.get("enabled"):
        raise ValueError("build_data_plane_client: the configuration does not enable the data plane; set enabled=True")
    if (cfg.get("observability") or {}).get("enabled"):
        log.warning("observability.enabled is ignored: wrap this client in NeMo-RL's own MetricsDataPlaneClient")
    return DataPlaneClient(session_of(cfg, bootstrap=bootstrap))


def session_of(cfg: Mapping[str, Any], *, bootstrap: bool) -> Session:
    """Open a session of the service that `cfg` describes; see `build_data_plane_client`."""
    _check_choice(cfg, "impl", IMPLEMENTATIONS)
    if cfg.get("backend") is not None:
        _check_choice(cfg, "backend", tuple(BLOCKS))
    blocks = {backend: _block(cfg, backend) for backend in BLOCKS}
    dataplane_settings = {**(cfg.get("dataplane") or {})}  # a copy, which is changed here
    if cfg.get("controller_address"):
        dataplane_settings["address"] = cfg["controller_address"]
    if cfg.get("ack_timeout_ms"):
        dataplane_settings["call_timeout_s"] = _milliseconds(cfg["ack_timeout_ms"]) / 1000
    conf: dict[str, Any] = {
        # The service stores polling_mode for callers of `get_meta`; claims of this client do not use it.
        "controller": {"polling_mode": True, "name": cfg.get("controller_name")},
        "dataplane": dataplane_settings,
    }
    objects = cfg.get("objects") or ("pickle" if replaced(ADAPTER) else None)
    if objects is not None:
        conf["objects"] = objects
    if bootstrap:
        _warn_of_unused(cfg, blocks)
    # A worker neither starts a service nor stores settings in it.
    return open_session(Settings.of(conf), given=bootstrap, start=bootstrap)


def _block(cfg: Mapping[str, Any], backend: str) -> Mapping[str, Any]:
    """Return the settings of a backend's block, empty without one. ValueError for unknown names."""
    block: Any = cfg.get(backend)
    if hasattr(block, "model_dump"):  # NeMo-RL converts the block to a model of pydantic
        block = block.model_dump(exclude_unset=True)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise TypeError(f"{backend}={block!r}: expected a mapping of settings")
    unknown = [f"{backend}.{name}" for name in block if name not in BLOCKS[backend]]
    if unknown:
        raise ValueError(
            f"build_data_plane_client: unknown settings {', '.join(unknown)}; "
            f"the block {backend} has {', '.join(BLOCKS[backend])}"
        )
    return block


def _warn_of_unused(cfg: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn once about each setting that is given and has no effect."""
    backend = cfg.get("backend") or "simple"
    if backend != "simple":
        warn_once(f"backend={backend!r} is not used: samples are in this package's storage units")
    for name, replacement in WITHOUT_BLOCK.items():
        if cfg.get(name) is not None:
            warn_once(f"{name}={cfg[name]!r} is not used: {replacement}")
    for name, value in blocks[backend].items():
        if value is not None:
            warn_once(f"{backend}.{name}={value!r} is not used: {BLOCKS[backend][name]}")


def _milliseconds(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"ack_timeout_ms={str(value)[:40]}: expected a number of milliseconds") from None


def _check_choice(cfg: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if cfg.get(name) not in choices:
        raise ValueError(f"build_data_plane_client: {name}={cfg.get(name)!r}, expected one of {', '.join(choices)}")
