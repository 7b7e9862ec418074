"""`rlinf.scheduler.dynamic_scheduler.utils`."""

from __future__ import annotations

from workers.rlinf.dynamic_scheduler import refuse

get_scheduler_channel = get_scheduler_request_queue = get_scheduler_response_queue = get_valid_dp_sizes = refuse
