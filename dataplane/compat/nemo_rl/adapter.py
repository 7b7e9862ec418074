"""What stands in for `nemo_rl.data_plane.adapters.transfer_queue` under the switch: NeMo-RL's own
`build_data_plane_client` then makes clients of this service for `impl: transfer_queue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane.compat.nemo_rl.client import DataPlaneClient
from dataplane.compat.nemo_rl.factory import session_of
from dataplane.compat.nemo_rl.meta import framework_type

__all__ = ["TQDataPlaneClient"]


class TQDataPlaneClient(DataPlaneClient):
    """The client of the service that `cfg` describes, as `build_data_plane_client` makes it. An instance of NeMo-RL's
    own `DataPlaneClient`, where NeMo-RL is installed."""

    def __init__(self, cfg: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        abstract = framework_type("DataPlaneClient")
        if abstract is not None and hasattr(abstract, "register"):
            abstract.register(TQDataPlaneClient)
        super().__init__(session_of(cfg, bootstrap=bootstrap))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{name!r} of NeMo-RL's TransferQueue adapter does not exist in {__name__}, which replaces it. "
        "Use the methods of the client, or run without the switch."
    )
