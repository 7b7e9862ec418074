"""`rlinf.scheduler.hardware`: the types of accelerators that RLinf's code compares with."""

from __future__ import annotations

from enum import StrEnum


class AcceleratorType(StrEnum):
    """A worker of this package has `NV_GPU` or `NO_ACCEL`, never another type."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"
