"""All targets by name."""

from __future__ import annotations

from tests.fuzz import (
    bulk_targets,
    checkpoint_targets,
    cli_targets,
    control_targets,
    data_targets,
    state_targets,
    web_targets,
    worker_targets,
)
from tests.fuzz.target import Target

_MODULES = (
    control_targets,
    data_targets,
    bulk_targets,
    state_targets,
    checkpoint_targets,
    cli_targets,
    worker_targets,
    web_targets,
)

TARGETS: dict[str, Target] = {target.name: target for module in _MODULES for target in module.TARGETS}
