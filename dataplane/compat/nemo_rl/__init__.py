"""NeMo-RL's data plane interface on this service. Import these names from here instead of from `nemo_rl.data_plane`.
docs/nemo_rl.md lists the differences."""

from dataplane.compat.nemo_rl.client import DataPlaneClient as DataPlaneClient
from dataplane.compat.nemo_rl.client import build_data_plane_client as build_data_plane_client
from dataplane.compat.nemo_rl.meta import KVBatchMeta as KVBatchMeta

__all__ = ["DataPlaneClient", "KVBatchMeta", "build_data_plane_client"]
