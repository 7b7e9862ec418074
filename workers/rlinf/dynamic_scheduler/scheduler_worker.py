"""`rlinf.scheduler.dynamic_scheduler.scheduler_worker`."""

from __future__ import annotations

from workers.rlinf.dynamic_scheduler import refuse


class SchedulerWorker:
    """A placeholder whose `create_group` raises NotImplementedError."""

    create_group = staticmethod(refuse)
