"""`rlinf.scheduler.collective`: work under way, and options of messages."""

from __future__ import annotations

from workers.groups.routed import AsyncRouteWork as AsyncRouteWork
from workers.messages import AsyncWork as AsyncWork
from workers.messages import CollectiveGroupOptions as CollectiveGroupOptions
