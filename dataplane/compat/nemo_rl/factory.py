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
BACKENDS = ("simple", "mooncake_cpu")
ADAPTER = "nemo_rl.data_plane.adapters.transfer_queue"
"""The module of NeMo-RL that the switch can replace."""
UNUSED = (
    "storage_capacity",
    "num_storage_units",
    "global_segment_size",
    "local_buffer_size",
    "claim_meta_poll_interval_s",
)


def build_data_plane_client(cfg: Mapping[str, Any] | None, *, bootstrap: bool = True) -> DataPlaneClient:
    """Return a client of the service that `cfg` describes.

    bootstrap: True in the driver, which starts a service if none is found. False in a worker, which only attaches;
    `NotInitializedError` (a RuntimeError) without a service. `dataplane.compat.transfer_queue.init` documents where a
    service is found and started.

    cfg: `enabled` must be true; `impl` is "transfer_queue" (for existing configurations) or "rl_dataplane";
    `controller_address` is the service's address, or `controller_name` its name (`controller.name` of `init`);
    `ack_timeout_ms` is the timeout of a command; `dataplane` has further settings of `DataPlaneConfig`; `objects` is
    that of `init`, by default "pickle" if the switch replaces NeMo-RL's adapter by this package. `backend` and its
    block, `claim_meta_poll_interval_s` and `observability` are ignored; the driver logs one warning about them.
    ValueError for a configuration that is not enabled, and for an `impl` or `backend` that NeMo-RL does not have.
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
        _check_choice(cfg, "backend", BACKENDS)
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
        _warn_of_unused(cfg)
    # A worker neither starts a service nor stores settings in it.
    return open_session(Settings.of(conf), given=bootstrap, start=bootstrap)


def _warn_of_unused(cfg: Mapping[str, Any]) -> None:
    """Log one warning with all ignored settings."""
    unused = [f"{name}={cfg[name]!r}" for name in UNUSED if cfg.get(name) is not None]
    if cfg.get("backend") == "mooncake_cpu":
        unused.append("backend='mooncake_cpu'")
    if unused:
        warn_once(
            f"not used: {', '.join(unused)}. Samples are in this package's storage units; configure these under "
            "`dataplane` (capacity_bytes, bulk_transport, ...). Claims wait on the service without polling"
        )


def _milliseconds(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"ack_timeout_ms={str(value)[:40]}: expected a number of milliseconds") from None


def _check_choice(cfg: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if cfg.get(name) not in choices:
        raise ValueError(f"build_data_plane_client: {name}={cfg.get(name)!r}, expected one of {', '.join(choices)}")
