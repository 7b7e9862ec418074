"""`rlinf.scheduler.channel`."""

from __future__ import annotations

from workers.channel import DEFAULT_KEY as DEFAULT_KEY
from workers.channel import Channel as Channel
