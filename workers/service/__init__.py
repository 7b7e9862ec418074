"""Run the service as Ray actors."""

from workers.service.launch import launch_service as launch_service
from workers.service.service import LaunchedService as LaunchedService
from workers.service.supervisor import ServiceNode as ServiceNode
from workers.service.supervisor import ServiceStartError as ServiceStartError
from workers.service.supervisor import ServiceUnit as ServiceUnit

__all__ = ["LaunchedService", "ServiceNode", "ServiceStartError", "ServiceUnit", "launch_service"]
