"""`rlinf.scheduler.dynamic_scheduler.scheduler_worker`."""

from __future__ import annotations

from workers.rlinf.dynamic_scheduler import refuse


class SchedulerWorker:
    """`create_group` is refused."""

    create_group = staticmethod(refuse)
