"""NeMo-RL's data plane interface over this service: what `nemo_rl.data_plane` has under these names can be imported
from here instead. docs/compat.md says what differs."""

from dataplane.compat.nemo_rl.client import DataPlaneClient as DataPlaneClient
from dataplane.compat.nemo_rl.factory import build_data_plane_client as build_data_plane_client
from dataplane.compat.nemo_rl.meta import KVBatchMeta as KVBatchMeta

__all__ = ["DataPlaneClient", "KVBatchMeta", "build_data_plane_client"]
