"""What `import dataplane` offers, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dataplane

pytestmark = pytest.mark.integration

EXPECTED = [
    "ADVANTAGES",
    "ArenaSpaceError",
    "AsyncDataPlaneClient",
    "AuthenticationError",
    "BadRequestError",
    "BatchedDataDict",
    "CallCancelledError",
    "CallTimeoutError",
    "CapacityTimeoutError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointWriteError",
    "ChecksumError",
    "ClaimConditions",
    "ClaimOptions",
    "ClaimTimeoutError",
    "ClientClosedError",
    "ContextParallel",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DrainError",
    "DynamicSampler",
    "ELEM_COUNTS_PER_GB",
    "FieldKind",
    "FieldNotFoundError",
    "FieldNotProducedError",
    "FieldSpec",
    "Flow",
    "GENERATION_LOGPROBS",
    "GLOBAL_FORWARD_PAD_SEQLEN",
    "INPUT_IDS",
    "INPUT_LENGTHS",
    "InOrder",
    "InternalError",
    "InvalidRequestError",
    "KVBatchMeta",
    "Layout",
    "LimitError",
    "MICRO_BATCH_INDICES",
    "MICRO_BATCH_LENGTHS",
    "MicroBatch",
    "NotFoundError",
    "OpEvent",
    "PACKING_KEYS",
    "PAD_TO_MULTIPLE",
    "PREV_LOGPROBS",
    "PartitionDroppedError",
    "PartitionExistsError",
    "PartitionNotFoundError",
    "PartitionSealedError",
    "PortTakenError",
    "ProtocolVersionError",
    "REFERENCE_POLICY_LOGPROBS",
    "ReadyFirst",
    "ReplayBuffer",
    "RequestTooLargeError",
    "Reservation",
    "RolloutAbortedError",
    "RowsChangedError",
    "SAMPLE_MASK",
    "SampleExistsError",
    "SampleNotFoundError",
    "SchemaError",
    "Server",
    "ServiceError",
    "ServiceRestartedError",
    "ServiceUnavailableError",
    "SessionExpiredError",
    "ShareConflictError",
    "Shared",
    "StaleCallError",
    "StaleSampleError",
    "StaleSchemaError",
    "StalenessPolicy",
    "StateDirError",
    "StorageUnitError",
    "StreamingDataLoader",
    "TOKEN_ALIGNED_FIELDS",
    "TOKEN_MASK",
    "TaskNotFoundError",
    "UnsupportedValueError",
    "WaitTimeoutError",
    "WeightFifo",
    "Windowed",
    "build_data_plane_client",
    "connect",
    "connect_async",
    "kv_first_write",
    "materialize",
    "maybe_pack_jagged",
    "pack_jagged_fields",
    "read_columns",
    "response_from_nested",
    "serve",
    "shard_meta_for_dp",
    "split_by_spread",
    "to_nested_by_length",
    "write_columns",
]


def test_all_is_pinned_and_there() -> None:
    assert list(dataplane.__all__) == EXPECTED
    for name in dataplane.__all__:
        assert getattr(dataplane, name) is not None
    assert set(EXPECTED) <= set(dir(dataplane))


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.slow
def test_dataplane_needs_no_ray() -> None:
    everything = "import dataplane\nfor name in dataplane.__all__: getattr(dataplane, name)"
    assert "ray" not in loaded_by(everything)
    assert "workers" not in loaded_by(everything)


def test_a_controller_and_a_unit_load_no_torch() -> None:
    loaded = loaded_by(
        "import dataplane, dataplane.cli, dataplane.controller.controller, dataplane.storage.unit, dataplane.service"
    )
    assert not loaded & {"torch", "tensordict", "ray"}
