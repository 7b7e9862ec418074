"""The data plane for RL post-training: jagged per-sample fields keyed by sample id, moved at the speed of memory.

Names are loaded when first used, so that a controller, which never needs torch, never imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.aclient import AsyncDataPlaneClient as AsyncDataPlaneClient
    from dataplane.attach import build_data_plane_client as build_data_plane_client
    from dataplane.attach import connect as connect
    from dataplane.attach import connect_async as connect_async
    from dataplane.batch import BatchedDataDict as BatchedDataDict
    from dataplane.batch import materialize as materialize
    from dataplane.client import DataPlaneClient as DataPlaneClient
    from dataplane.column_api import kv_first_write as kv_first_write
    from dataplane.column_api import read_columns as read_columns
    from dataplane.column_api import write_columns as write_columns
    from dataplane.columns import Shared as Shared
    from dataplane.config import DataPlaneConfig as DataPlaneConfig
    from dataplane.errors import DataPlaneError as DataPlaneError
    from dataplane.jagged import maybe_pack_jagged as maybe_pack_jagged
    from dataplane.jagged import pack_jagged_fields as pack_jagged_fields
    from dataplane.jagged import response_from_nested as response_from_nested
    from dataplane.jagged import to_nested_by_length as to_nested_by_length
    from dataplane.meta import KVBatchMeta as KVBatchMeta
    from dataplane.packing import shard_meta_for_dp as shard_meta_for_dp
    from dataplane.server import Server as Server
    from dataplane.server import serve as serve
    from dataplane.types import FieldKind as FieldKind
    from dataplane.types import FieldSpec as FieldSpec

_HOME = {
    "AsyncDataPlaneClient": "dataplane.aclient",
    "BatchedDataDict": "dataplane.batch",
    "DataPlaneClient": "dataplane.client",
    "DataPlaneConfig": "dataplane.config",
    "DataPlaneError": "dataplane.errors",
    "FieldKind": "dataplane.types",
    "FieldSpec": "dataplane.types",
    "KVBatchMeta": "dataplane.meta",
    "Server": "dataplane.server",
    "Shared": "dataplane.columns",
    "build_data_plane_client": "dataplane.attach",
    "connect": "dataplane.attach",
    "connect_async": "dataplane.attach",
    "kv_first_write": "dataplane.column_api",
    "materialize": "dataplane.batch",
    "maybe_pack_jagged": "dataplane.jagged",
    "pack_jagged_fields": "dataplane.jagged",
    "read_columns": "dataplane.column_api",
    "response_from_nested": "dataplane.jagged",
    "serve": "dataplane.server",
    "shard_meta_for_dp": "dataplane.packing",
    "to_nested_by_length": "dataplane.jagged",
    "write_columns": "dataplane.column_api",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
