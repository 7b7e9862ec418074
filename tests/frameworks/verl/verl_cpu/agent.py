"""The single-turn agent loop with a seed for each request: `agent.yaml` names it."""

import os
import zlib
from typing import Any
from uuid import UUID

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

FAILS = int(os.environ.get("VERL_CPU_FAIL_EVERY", "0"))
"""Every Nth prompt fails; 0: none."""


class SeededAgentLoop(SingleTurnAgentLoop):
    """A request's seed comes from its prompt's uid and its place in the group."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if FAILS and UUID(kwargs["uid"]).int % FAILS == 0:
            raise RuntimeError("this prompt fails, as VERL_CPU_FAIL_EVERY wants it")
        seed = zlib.crc32(f"{kwargs['uid']}_{kwargs['session_id']}".encode())
        return await super().run({**sampling_params, "seed": seed}, **kwargs)
