"""What lets an unmodified verl train on CPUs, through verl's own registries. VERL_USE_EXTERNAL_MODULES names this
package, so each process imports it at the end of `import verl`."""

import os

from verl_cpu import platform, registering

registering.rollouts()
if "RANK" in os.environ:  # a training worker: it alone builds engines, whose modules take seconds to import
    registering.engines()

__all__ = ["platform", "registering"]
