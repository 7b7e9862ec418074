from __future__ import annotations

import numpy as np

from dataplane.core.types import DTYPE_BYTES
from dataplane.data.tensor_memory import DTYPE_NAMES, TORCH_DTYPES, tensor_from_numpy, writable_alias


def test_dtypes_by_name() -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES) == set(DTYPE_NAMES.values())
    for name, dtype in TORCH_DTYPES.items():
        assert str(dtype) == f"torch.{name}"
        assert dtype.itemsize == DTYPE_BYTES[name]


def test_read_only_memory_without_a_warning_and_kept_alive() -> None:
    array = np.frombuffer(bytes(range(8)), dtype=np.uint8)
    assert tensor_from_numpy(array).tolist() == list(range(8))
    alias = writable_alias(array)
    assert alias.__array_interface__["data"] == (array.__array_interface__["data"][0], False)
    assert tensor_from_numpy(np.arange(3, dtype=">i8")).tolist() == [0, 1, 2]
