"""Lets an unmodified verl train on CPUs, through verl's own registries. VERL_USE_EXTERNAL_MODULES names this package,
so each process imports it at the end of `import verl`."""

import os

import torchvision_on_cpu  # noqa: F401  # before anything imports torchvision

from verl_cpu import platform, registering

registering.rollouts()
if file := os.environ.get("VERL_CPU_CALLS"):
    from verl_cpu.calls import time_calls

    time_calls(file)
if "RANK" in os.environ:  # only training workers build engines, whose modules take seconds to import
    registering.engines()

__all__ = ["platform", "registering"]
