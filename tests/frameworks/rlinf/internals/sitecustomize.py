"""On PYTHONPATH of RLinf's tests under the switch, in Ray's workers too.

Some of RLinf's tests import classes of its internals (manager actors, process groups), which this project does not
have. Here these are None, so that the other tests of their files can be collected; those that use one fail.
"""

import os
import sys
import types

INTERNALS = {
    "manager.coll_manager": ("CollectiveManager",),
    "manager.manager": ("Manager",),
    "collective.collective_group": ("CollectiveGroup",),
    "collective.multi_channel_pg": ("MultiChannelProcessGroup",),
}

if "rlinf.scheduler" in os.environ.get("TQ_REPLACE", "") or "workers.rlinf" in sys.orig_argv:
    for name, kinds in INTERNALS.items():
        module = types.ModuleType(f"rlinf.scheduler.{name}")
        vars(module).update(dict.fromkeys(kinds))
        sys.modules[module.__name__] = module
