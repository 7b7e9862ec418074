"""`rlinf.scheduler.channel`."""

from __future__ import annotations

from workers.channels import DEFAULT_KEY as DEFAULT_KEY
from workers.channels import Channel as Channel
