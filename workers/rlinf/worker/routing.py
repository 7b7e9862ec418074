"""`rlinf.scheduler.worker.routing`."""

from __future__ import annotations

from workers.directory import DirectoryClient
from workers.groups.batch_routing import CommMapper as CommMapper
from workers.groups.batch_routing import RouteEntry as RouteEntry
from workers.groups.batch_routing import RoutePlan as RoutePlan
from workers.groups.batch_routing import build_recv_plan as build_recv_plan
from workers.groups.batch_routing import build_route_channel_key as build_route_channel_key
from workers.groups.batch_routing import build_send_key as build_send_key
from workers.groups.batch_routing import build_send_plan as build_send_plan
from workers.groups.batch_routing import decoupled_build_recv_plan as decoupled_build_recv_plan
from workers.groups.batch_routing import decoupled_build_send_plan as decoupled_build_send_plan
from workers.groups.batch_routing import get_batch_size as get_batch_size
from workers.groups.batch_routing import infer_batch_size as infer_batch_size
from workers.groups.batch_routing import merge_batches as merge_batches
from workers.groups.batch_routing import split_batch as split_batch
from workers.groups.batch_routing import split_channel_message as split_channel_message
from workers.groups.routed import group_world_size


def get_group_world_size(manager_proxy: DirectoryClient, group_name: str) -> int:
    """Return the number of workers of a group. manager_proxy: a worker's `manager_proxy`. `NameNotFoundError` if the
    group is not launched within a minute."""
    return group_world_size(manager_proxy, group_name)
