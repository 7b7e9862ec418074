"""Data plane for RL post-training: stores and transfers jagged per-sample fields, keyed by sample id.

Public names are imported on first access. A controller therefore never imports torch, which it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.attach import build_data_plane_client as build_data_plane_client
    from dataplane.attach import connect as connect
    from dataplane.attach import connect_async as connect_async
    from dataplane.client.async_client import AsyncDataPlaneClient as AsyncDataPlaneClient
    from dataplane.client.checkpoint import CheckpointInfo as CheckpointInfo
    from dataplane.client.client import DataPlaneClient as DataPlaneClient
    from dataplane.client.columns import kv_first_write as kv_first_write
    from dataplane.client.columns import read_columns as read_columns
    from dataplane.client.columns import write_columns as write_columns
    from dataplane.client.events import OpEvent as OpEvent
    from dataplane.client.operations.claim import ClaimConditions as ClaimConditions
    from dataplane.client.operations.claim import ClaimOptions as ClaimOptions
    from dataplane.config import DataPlaneConfig as DataPlaneConfig
    from dataplane.core.schema import ADVANTAGES as ADVANTAGES
    from dataplane.core.schema import ELEM_COUNTS_PER_GB as ELEM_COUNTS_PER_GB
    from dataplane.core.schema import GENERATION_LOGPROBS as GENERATION_LOGPROBS
    from dataplane.core.schema import GLOBAL_FORWARD_PAD_SEQLEN as GLOBAL_FORWARD_PAD_SEQLEN
    from dataplane.core.schema import INPUT_IDS as INPUT_IDS
    from dataplane.core.schema import INPUT_LENGTHS as INPUT_LENGTHS
    from dataplane.core.schema import MICRO_BATCH_INDICES as MICRO_BATCH_INDICES
    from dataplane.core.schema import MICRO_BATCH_LENGTHS as MICRO_BATCH_LENGTHS
    from dataplane.core.schema import PACKING_KEYS as PACKING_KEYS
    from dataplane.core.schema import PAD_TO_MULTIPLE as PAD_TO_MULTIPLE
    from dataplane.core.schema import PREV_LOGPROBS as PREV_LOGPROBS
    from dataplane.core.schema import REFERENCE_POLICY_LOGPROBS as REFERENCE_POLICY_LOGPROBS
    from dataplane.core.schema import SAMPLE_MASK as SAMPLE_MASK
    from dataplane.core.schema import TOKEN_ALIGNED_FIELDS as TOKEN_ALIGNED_FIELDS
    from dataplane.core.schema import TOKEN_MASK as TOKEN_MASK
    from dataplane.core.schema import Layout as Layout
    from dataplane.core.types import FieldKind as FieldKind
    from dataplane.core.types import FieldSpec as FieldSpec
    from dataplane.data.batch import BatchedDataDict as BatchedDataDict
    from dataplane.data.batch import materialize as materialize
    from dataplane.data.columns import Shared as Shared
    from dataplane.data.jagged import maybe_pack_jagged as maybe_pack_jagged
    from dataplane.data.jagged import pack_jagged_fields as pack_jagged_fields
    from dataplane.data.jagged import response_from_nested as response_from_nested
    from dataplane.data.jagged import to_nested_by_length as to_nested_by_length
    from dataplane.data.meta import KVBatchMeta as KVBatchMeta
    from dataplane.data.packing import shard_meta_for_dp as shard_meta_for_dp
    from dataplane.data.row_parts import ContextParallel as ContextParallel
    from dataplane.errors import ArenaSpaceError as ArenaSpaceError
    from dataplane.errors import AuthenticationError as AuthenticationError
    from dataplane.errors import BadRequestError as BadRequestError
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
    from dataplane.errors import NotFoundError as NotFoundError
    from dataplane.errors import PartitionDroppedError as PartitionDroppedError
    from dataplane.errors import PartitionExistsError as PartitionExistsError
    from dataplane.errors import PartitionNotFoundError as PartitionNotFoundError
    from dataplane.errors import PartitionSealedError as PartitionSealedError
    from dataplane.errors import PortTakenError as PortTakenError
    from dataplane.errors import ProtocolVersionError as ProtocolVersionError
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
    from dataplane.errors import ShareConflictError as ShareConflictError
    from dataplane.errors import StaleCallError as StaleCallError
    from dataplane.errors import StaleSampleError as StaleSampleError
    from dataplane.errors import StaleSchemaError as StaleSchemaError
    from dataplane.errors import StateDirError as StateDirError
    from dataplane.errors import StorageUnitError as StorageUnitError
    from dataplane.errors import TaskNotFoundError as TaskNotFoundError
    from dataplane.errors import UnsupportedValueError as UnsupportedValueError
    from dataplane.errors import WaitTimeoutError as WaitTimeoutError
    from dataplane.service import Server as Server
    from dataplane.service import serve as serve
    from dataplane.training.data_loader import MicroBatch as MicroBatch
    from dataplane.training.data_loader import StreamingDataLoader as StreamingDataLoader
    from dataplane.training.dynamic_sampling import DynamicSampler as DynamicSampler
    from dataplane.training.dynamic_sampling import split_by_spread as split_by_spread
    from dataplane.training.replay_buffer import ReplayBuffer as ReplayBuffer
    from dataplane.training.replay_buffer import Reservation as Reservation
    from dataplane.training.staleness import Flow as Flow
    from dataplane.training.staleness import InOrder as InOrder
    from dataplane.training.staleness import ReadyFirst as ReadyFirst
    from dataplane.training.staleness import StalenessPolicy as StalenessPolicy
    from dataplane.training.staleness import WeightFifo as WeightFifo
    from dataplane.training.staleness import Windowed as Windowed

_HOME = {
    "ADVANTAGES": "dataplane.core.schema",
    "ArenaSpaceError": "dataplane.errors",
    "AsyncDataPlaneClient": "dataplane.client.async_client",
    "AuthenticationError": "dataplane.errors",
    "BadRequestError": "dataplane.errors",
    "BatchedDataDict": "dataplane.data.batch",
    "CallCancelledError": "dataplane.errors",
    "CallTimeoutError": "dataplane.errors",
    "CapacityTimeoutError": "dataplane.errors",
    "CheckpointError": "dataplane.errors",
    "CheckpointInfo": "dataplane.client.checkpoint",
    "CheckpointWriteError": "dataplane.errors",
    "ChecksumError": "dataplane.errors",
    "ClaimConditions": "dataplane.client.operations.claim",
    "ClaimOptions": "dataplane.client.operations.claim",
    "ClaimTimeoutError": "dataplane.errors",
    "ClientClosedError": "dataplane.errors",
    "ContextParallel": "dataplane.data.row_parts",
    "DataPlaneClient": "dataplane.client.client",
    "DataPlaneConfig": "dataplane.config",
    "DataPlaneError": "dataplane.errors",
    "DrainError": "dataplane.errors",
    "DynamicSampler": "dataplane.training.dynamic_sampling",
    "ELEM_COUNTS_PER_GB": "dataplane.core.schema",
    "FieldKind": "dataplane.core.types",
    "FieldNotFoundError": "dataplane.errors",
    "FieldNotProducedError": "dataplane.errors",
    "FieldSpec": "dataplane.core.types",
    "Flow": "dataplane.training.staleness",
    "GENERATION_LOGPROBS": "dataplane.core.schema",
    "GLOBAL_FORWARD_PAD_SEQLEN": "dataplane.core.schema",
    "INPUT_IDS": "dataplane.core.schema",
    "INPUT_LENGTHS": "dataplane.core.schema",
    "InOrder": "dataplane.training.staleness",
    "InternalError": "dataplane.errors",
    "InvalidRequestError": "dataplane.errors",
    "KVBatchMeta": "dataplane.data.meta",
    "Layout": "dataplane.core.schema",
    "LimitError": "dataplane.errors",
    "MICRO_BATCH_INDICES": "dataplane.core.schema",
    "MICRO_BATCH_LENGTHS": "dataplane.core.schema",
    "MicroBatch": "dataplane.training.data_loader",
    "NotFoundError": "dataplane.errors",
    "OpEvent": "dataplane.client.events",
    "PACKING_KEYS": "dataplane.core.schema",
    "PAD_TO_MULTIPLE": "dataplane.core.schema",
    "PREV_LOGPROBS": "dataplane.core.schema",
    "PartitionDroppedError": "dataplane.errors",
    "PartitionExistsError": "dataplane.errors",
    "PartitionNotFoundError": "dataplane.errors",
    "PartitionSealedError": "dataplane.errors",
    "PortTakenError": "dataplane.errors",
    "ProtocolVersionError": "dataplane.errors",
    "REFERENCE_POLICY_LOGPROBS": "dataplane.core.schema",
    "ReadyFirst": "dataplane.training.staleness",
    "ReplayBuffer": "dataplane.training.replay_buffer",
    "RequestTooLargeError": "dataplane.errors",
    "Reservation": "dataplane.training.replay_buffer",
    "RolloutAbortedError": "dataplane.errors",
    "RowsChangedError": "dataplane.errors",
    "SAMPLE_MASK": "dataplane.core.schema",
    "SampleExistsError": "dataplane.errors",
    "SampleNotFoundError": "dataplane.errors",
    "SchemaError": "dataplane.errors",
    "Server": "dataplane.service",
    "ServiceError": "dataplane.errors",
    "ServiceRestartedError": "dataplane.errors",
    "ServiceUnavailableError": "dataplane.errors",
    "SessionExpiredError": "dataplane.errors",
    "ShareConflictError": "dataplane.errors",
    "Shared": "dataplane.data.columns",
    "StaleCallError": "dataplane.errors",
    "StaleSampleError": "dataplane.errors",
    "StaleSchemaError": "dataplane.errors",
    "StalenessPolicy": "dataplane.training.staleness",
    "StateDirError": "dataplane.errors",
    "StorageUnitError": "dataplane.errors",
    "StreamingDataLoader": "dataplane.training.data_loader",
    "TOKEN_ALIGNED_FIELDS": "dataplane.core.schema",
    "TOKEN_MASK": "dataplane.core.schema",
    "TaskNotFoundError": "dataplane.errors",
    "UnsupportedValueError": "dataplane.errors",
    "WaitTimeoutError": "dataplane.errors",
    "WeightFifo": "dataplane.training.staleness",
    "Windowed": "dataplane.training.staleness",
    "build_data_plane_client": "dataplane.attach",
    "connect": "dataplane.attach",
    "connect_async": "dataplane.attach",
    "kv_first_write": "dataplane.client.columns",
    "materialize": "dataplane.data.batch",
    "maybe_pack_jagged": "dataplane.data.jagged",
    "pack_jagged_fields": "dataplane.data.jagged",
    "read_columns": "dataplane.client.columns",
    "response_from_nested": "dataplane.data.jagged",
    "serve": "dataplane.service",
    "shard_meta_for_dp": "dataplane.data.packing",
    "split_by_spread": "dataplane.training.dynamic_sampling",
    "to_nested_by_length": "dataplane.data.jagged",
    "write_columns": "dataplane.client.columns",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, on first access."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
