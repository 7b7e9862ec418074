"""`rlinf.scheduler.worker.worker_group`."""

from __future__ import annotations

from workers.groups.calls import GroupCall
from workers.groups.worker_group import WorkerGroup as WorkerGroup

WorkerGroupFuncResult = GroupCall
