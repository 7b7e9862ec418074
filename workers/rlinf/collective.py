"""`rlinf.scheduler.collective`: handles of asynchronous messages, and message options."""

from __future__ import annotations

from workers.groups.routed import AsyncRouteWork as AsyncRouteWork
from workers.messages import AsyncWork as AsyncWork
from workers.messages import CollectiveGroupOptions as CollectiveGroupOptions
