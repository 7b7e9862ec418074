"""The service as Ray actors."""

from workers.service.launched import LaunchedService as LaunchedService
from workers.service.launching import launch_service as launch_service
from workers.service.nodes import RayNode as RayNode
from workers.service.views import ServiceNode as ServiceNode
from workers.service.views import ServiceStartError as ServiceStartError
from workers.service.views import ServiceUnit as ServiceUnit

__all__ = ["LaunchedService", "RayNode", "ServiceNode", "ServiceStartError", "ServiceUnit", "launch_service"]
