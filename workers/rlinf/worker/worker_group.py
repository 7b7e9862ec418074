"""`rlinf.scheduler.worker.worker_group`."""

from __future__ import annotations

from workers.calls import GroupCall
from workers.worker_group import WorkerGroup as WorkerGroup

WorkerGroupFuncResult = GroupCall
