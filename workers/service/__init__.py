"""Run the service as Ray actors."""

from workers.service.launch import launch_service as launch_service
from workers.service.nodes import RayNode as RayNode
from workers.service.plan import ServiceNode as ServiceNode
from workers.service.plan import ServiceStartError as ServiceStartError
from workers.service.plan import ServiceUnit as ServiceUnit
from workers.service.service import LaunchedService as LaunchedService

__all__ = ["LaunchedService", "RayNode", "ServiceNode", "ServiceStartError", "ServiceUnit", "launch_service"]
