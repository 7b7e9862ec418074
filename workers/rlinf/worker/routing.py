"""`rlinf.scheduler.worker.routing`."""

from __future__ import annotations

from workers.directory import DirectoryClient
from workers.routed import group_world_size
from workers.routing import CommMapper as CommMapper
from workers.routing import RouteEntry as RouteEntry
from workers.routing import RoutePlan as RoutePlan
from workers.routing import build_recv_plan as build_recv_plan
from workers.routing import build_route_channel_key as build_route_channel_key
from workers.routing import build_send_key as build_send_key
from workers.routing import build_send_plan as build_send_plan
from workers.routing import decoupled_build_recv_plan as decoupled_build_recv_plan
from workers.routing import decoupled_build_send_plan as decoupled_build_send_plan
from workers.routing import get_batch_size as get_batch_size
from workers.routing import infer_batch_size as infer_batch_size
from workers.routing import merge_batches as merge_batches
from workers.routing import split_batch as split_batch
from workers.routing import split_channel_message as split_channel_message


def get_group_world_size(manager_proxy: DirectoryClient, group_name: str) -> int:
    """How many workers a group has. manager_proxy: a worker's `manager_proxy`. `NameNotFoundError` for a group that is
    not launched within a minute."""
    return group_world_size(manager_proxy, group_name)
