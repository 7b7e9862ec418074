"""Options of the connection between two workers, or among those of a broadcast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveGroupOptions:
    """How a pair of workers, or the workers of a broadcast, shall communicate. They count at first contact.

    accel_cluster_size, accel_max_ctas, accel_min_ctas, is_high_priority_stream: what `ProcessGroupNCCL.Options` calls
    cluster size, most and fewest blocks, and a stream of high priority. No options means these defaults. Both ends must
    name the same: they are compared whatever the road, though CPU memory needs none of them.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
