"""Replacement for `nemo_rl.data_plane.adapters.transfer_queue` under the switch. NeMo-RL's own
`build_data_plane_client` then creates clients of this service for `impl: transfer_queue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane.compat.nemo_rl.client import DataPlaneClient, session_of
from dataplane.compat.nemo_rl.meta import framework_type

__all__ = ["TQDataPlaneClient"]


class TQDataPlaneClient(DataPlaneClient):
    """A client of the service that `cfg` describes, equal to the result of `build_data_plane_client`. If NeMo-RL is
    installed, it is an instance of NeMo-RL's own `DataPlaneClient`."""

    def __init__(self, cfg: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        """See `build_data_plane_client`."""
        abstract = framework_type("DataPlaneClient")
        if abstract is not None and hasattr(abstract, "register"):  # an abstract base class: `isinstance` becomes true
            abstract.register(TQDataPlaneClient)
        super().__init__(session_of(cfg, bootstrap=bootstrap))


def __getattr__(name: str) -> Any:
    """Explain an import of a name that only NeMo-RL's own adapter module has."""
    if name.startswith("__"):  # Python and tools look such names up without an import statement
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{__name__} replaces NeMo-RL's TransferQueue adapter and does not define {name!r}. "
        "Use the methods of the client, or start the program without python -m dataplane.compat.nemo_rl and with "
        "TQ_REPLACE unset."
    )
