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
    from dataplane.checkpoint import CheckpointInfo as CheckpointInfo
    from dataplane.client import DataPlaneClient as DataPlaneClient
    from dataplane.column_api import kv_first_write as kv_first_write
    from dataplane.column_api import read_columns as read_columns
    from dataplane.column_api import write_columns as write_columns
    from dataplane.columns import Shared as Shared
    from dataplane.config import DataPlaneConfig as DataPlaneConfig
    from dataplane.dynamic_sampling import DynamicSampler as DynamicSampler
    from dataplane.dynamic_sampling import split_by_spread as split_by_spread
    from dataplane.errors import ArenaSpaceError as ArenaSpaceError
    from dataplane.errors import AuthenticationError as AuthenticationError
    from dataplane.errors import CallCancelledError as CallCancelledError
    from dataplane.errors import CallTimeoutError as CallTimeoutError
    from dataplane.errors import CapacityTimeoutError as CapacityTimeoutError
    from dataplane.errors import CheckpointError as CheckpointError
    from dataplane.errors import CheckpointWriteError as CheckpointWriteError
    from dataplane.errors import ChecksumError as ChecksumError
    from dataplane.errors import ClaimTimeoutError as ClaimTimeoutError
    from dataplane.errors import ClientClosedError as ClientClosedError
    from dataplane.errors import DataPlaneError as DataPlaneError
    from dataplane.errors import DrainError as DrainError
    from dataplane.errors import FieldNotFoundError as FieldNotFoundError
    from dataplane.errors import FieldNotProducedError as FieldNotProducedError
    from dataplane.errors import InternalError as InternalError
    from dataplane.errors import InvalidRequestError as InvalidRequestError
    from dataplane.errors import LimitError as LimitError
    from dataplane.errors import NotThereError as NotThereError
    from dataplane.errors import PartitionDroppedError as PartitionDroppedError
    from dataplane.errors import PartitionExistsError as PartitionExistsError
    from dataplane.errors import PartitionNotFoundError as PartitionNotFoundError
    from dataplane.errors import PartitionSealedError as PartitionSealedError
    from dataplane.errors import PortTakenError as PortTakenError
    from dataplane.errors import ProtocolVersionError as ProtocolVersionError
    from dataplane.errors import RefusedError as RefusedError
    from dataplane.errors import RequestTooLargeError as RequestTooLargeError
    from dataplane.errors import RolloutAbortedError as RolloutAbortedError
    from dataplane.errors import RowsChangedError as RowsChangedError
    from dataplane.errors import SampleExistsError as SampleExistsError
    from dataplane.errors import SampleNotFoundError as SampleNotFoundError
    from dataplane.errors import SchemaError as SchemaError
    from dataplane.errors import ServiceError as ServiceError
    from dataplane.errors import ServiceRestartedError as ServiceRestartedError
    from dataplane.errors import ServiceUnavailableError as ServiceUnavailableError
    from dataplane.errors import SessionExpiredError as SessionExpiredError
    from dataplane.errors import ShareTakenError as ShareTakenError
    from dataplane.errors import StaleCallError as StaleCallError
    from dataplane.errors import StaleSampleError as StaleSampleError
    from dataplane.errors import StaleSchemaError as StaleSchemaError
    from dataplane.errors import StateDirError as StateDirError
    from dataplane.errors import StorageUnitError as StorageUnitError
    from dataplane.errors import TaskNotFoundError as TaskNotFoundError
    from dataplane.errors import TlsError as TlsError
    from dataplane.errors import UnsupportedValueError as UnsupportedValueError
    from dataplane.errors import WaitTimeoutError as WaitTimeoutError
    from dataplane.events import OpEvent as OpEvent
    from dataplane.jagged import maybe_pack_jagged as maybe_pack_jagged
    from dataplane.jagged import pack_jagged_fields as pack_jagged_fields
    from dataplane.jagged import response_from_nested as response_from_nested
    from dataplane.jagged import to_nested_by_length as to_nested_by_length
    from dataplane.meta import KVBatchMeta as KVBatchMeta
    from dataplane.packing import shard_meta_for_dp as shard_meta_for_dp
    from dataplane.replay import ReplayBuffer as ReplayBuffer
    from dataplane.replay import Reservation as Reservation
    from dataplane.schema import ADVANTAGES as ADVANTAGES
    from dataplane.schema import ELEM_COUNTS_PER_GB as ELEM_COUNTS_PER_GB
    from dataplane.schema import GENERATION_LOGPROBS as GENERATION_LOGPROBS
    from dataplane.schema import GLOBAL_FORWARD_PAD_SEQLEN as GLOBAL_FORWARD_PAD_SEQLEN
    from dataplane.schema import INPUT_IDS as INPUT_IDS
    from dataplane.schema import INPUT_LENGTHS as INPUT_LENGTHS
    from dataplane.schema import MICRO_BATCH_INDICES as MICRO_BATCH_INDICES
    from dataplane.schema import MICRO_BATCH_LENGTHS as MICRO_BATCH_LENGTHS
    from dataplane.schema import PACKING_KEYS as PACKING_KEYS
    from dataplane.schema import PAD_TO_MULTIPLE as PAD_TO_MULTIPLE
    from dataplane.schema import PREV_LOGPROBS as PREV_LOGPROBS
    from dataplane.schema import REFERENCE_POLICY_LOGPROBS as REFERENCE_POLICY_LOGPROBS
    from dataplane.schema import SAMPLE_MASK as SAMPLE_MASK
    from dataplane.schema import TOKEN_ALIGNED_FIELDS as TOKEN_ALIGNED_FIELDS
    from dataplane.schema import TOKEN_MASK as TOKEN_MASK
    from dataplane.schema import Layout as Layout
    from dataplane.server import Server as Server
    from dataplane.server import serve as serve
    from dataplane.staleness import Flow as Flow
    from dataplane.staleness import InOrder as InOrder
    from dataplane.staleness import ReadyFirst as ReadyFirst
    from dataplane.staleness import StalenessPolicy as StalenessPolicy
    from dataplane.staleness import WeightFifo as WeightFifo
    from dataplane.staleness import Windowed as Windowed
    from dataplane.streaming import MicroBatch as MicroBatch
    from dataplane.streaming import StreamingDataLoader as StreamingDataLoader
    from dataplane.types import FieldKind as FieldKind
    from dataplane.types import FieldSpec as FieldSpec

_HOME = {
    "ADVANTAGES": "dataplane.schema",
    "ArenaSpaceError": "dataplane.errors",
    "AsyncDataPlaneClient": "dataplane.aclient",
    "AuthenticationError": "dataplane.errors",
    "BatchedDataDict": "dataplane.batch",
    "CallCancelledError": "dataplane.errors",
    "CallTimeoutError": "dataplane.errors",
    "CapacityTimeoutError": "dataplane.errors",
    "CheckpointError": "dataplane.errors",
    "CheckpointInfo": "dataplane.checkpoint",
    "CheckpointWriteError": "dataplane.errors",
    "ChecksumError": "dataplane.errors",
    "ClaimTimeoutError": "dataplane.errors",
    "ClientClosedError": "dataplane.errors",
    "DataPlaneClient": "dataplane.client",
    "DataPlaneConfig": "dataplane.config",
    "DataPlaneError": "dataplane.errors",
    "DrainError": "dataplane.errors",
    "DynamicSampler": "dataplane.dynamic_sampling",
    "ELEM_COUNTS_PER_GB": "dataplane.schema",
    "FieldKind": "dataplane.types",
    "FieldNotFoundError": "dataplane.errors",
    "FieldNotProducedError": "dataplane.errors",
    "FieldSpec": "dataplane.types",
    "Flow": "dataplane.staleness",
    "GENERATION_LOGPROBS": "dataplane.schema",
    "GLOBAL_FORWARD_PAD_SEQLEN": "dataplane.schema",
    "INPUT_IDS": "dataplane.schema",
    "INPUT_LENGTHS": "dataplane.schema",
    "InOrder": "dataplane.staleness",
    "InternalError": "dataplane.errors",
    "InvalidRequestError": "dataplane.errors",
    "KVBatchMeta": "dataplane.meta",
    "Layout": "dataplane.schema",
    "MICRO_BATCH_INDICES": "dataplane.schema",
    "MICRO_BATCH_LENGTHS": "dataplane.schema",
    "MicroBatch": "dataplane.streaming",
    "NotThereError": "dataplane.errors",
    "OpEvent": "dataplane.events",
    "PACKING_KEYS": "dataplane.schema",
    "PAD_TO_MULTIPLE": "dataplane.schema",
    "PREV_LOGPROBS": "dataplane.schema",
    "LimitError": "dataplane.errors",
    "PartitionDroppedError": "dataplane.errors",
    "PartitionExistsError": "dataplane.errors",
    "PartitionNotFoundError": "dataplane.errors",
    "PartitionSealedError": "dataplane.errors",
    "PortTakenError": "dataplane.errors",
    "ProtocolVersionError": "dataplane.errors",
    "REFERENCE_POLICY_LOGPROBS": "dataplane.schema",
    "ReadyFirst": "dataplane.staleness",
    "RefusedError": "dataplane.errors",
    "ReplayBuffer": "dataplane.replay",
    "RequestTooLargeError": "dataplane.errors",
    "Reservation": "dataplane.replay",
    "RolloutAbortedError": "dataplane.errors",
    "SAMPLE_MASK": "dataplane.schema",
    "RowsChangedError": "dataplane.errors",
    "SampleExistsError": "dataplane.errors",
    "SampleNotFoundError": "dataplane.errors",
    "SchemaError": "dataplane.errors",
    "Server": "dataplane.server",
    "ServiceError": "dataplane.errors",
    "ServiceRestartedError": "dataplane.errors",
    "StateDirError": "dataplane.errors",
    "ServiceUnavailableError": "dataplane.errors",
    "SessionExpiredError": "dataplane.errors",
    "ShareTakenError": "dataplane.errors",
    "Shared": "dataplane.columns",
    "StaleCallError": "dataplane.errors",
    "StaleSampleError": "dataplane.errors",
    "StaleSchemaError": "dataplane.errors",
    "StalenessPolicy": "dataplane.staleness",
    "StorageUnitError": "dataplane.errors",
    "StreamingDataLoader": "dataplane.streaming",
    "TOKEN_ALIGNED_FIELDS": "dataplane.schema",
    "TOKEN_MASK": "dataplane.schema",
    "TaskNotFoundError": "dataplane.errors",
    "TlsError": "dataplane.errors",
    "UnsupportedValueError": "dataplane.errors",
    "WaitTimeoutError": "dataplane.errors",
    "WeightFifo": "dataplane.staleness",
    "Windowed": "dataplane.staleness",
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
    "split_by_spread": "dataplane.dynamic_sampling",
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
