"""`rlinf.scheduler.hardware`: the types of accelerators that RLinf's code compares with."""

from __future__ import annotations

from enum import StrEnum


class AcceleratorType(StrEnum):
    """A worker has the type of torch's accelerator. AMD's GPUs count as `NV_GPU`, because torch calls them "cuda"."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"


BY_DEVICE_TYPE = {
    "cuda": AcceleratorType.NV_GPU,
    "xpu": AcceleratorType.INTEL_GPU,
    "npu": AcceleratorType.NPU,
    "musa": AcceleratorType.MUSA_GPU,
}
"""Types of accelerators by torch's device type."""
