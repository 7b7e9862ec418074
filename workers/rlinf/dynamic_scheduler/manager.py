"""`rlinf.scheduler.dynamic_scheduler.manager`."""

from __future__ import annotations

from workers.rlinf.dynamic_scheduler import refuse

RolloutScalingScheduler = refuse
