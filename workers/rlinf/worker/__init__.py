"""`rlinf.scheduler.worker`."""

from __future__ import annotations

from workers.rlinf.worker.worker import Worker as Worker
from workers.rlinf.worker.worker import WorkerAddress as WorkerAddress
from workers.rlinf.worker.worker_group import WorkerGroup as WorkerGroup
from workers.rlinf.worker.worker_group import WorkerGroupFuncResult as WorkerGroupFuncResult
