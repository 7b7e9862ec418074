"""`rlinf.scheduler.hardware`: the kinds of accelerators that RLinf's code asks about."""

from __future__ import annotations

from enum import StrEnum


class AcceleratorType(StrEnum):
    """A worker here has `NV_GPU` or `NO_ACCEL`; the others are never true."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"
