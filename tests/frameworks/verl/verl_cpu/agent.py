"""The single-turn agent loop with a seed for each request: `agent.yaml` names it."""

import zlib
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededAgentLoop(SingleTurnAgentLoop):
    """A request's seed comes from its prompt's uid and its place in the group."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        seed = zlib.crc32(f"{kwargs['uid']}_{kwargs['session_id']}".encode())
        return await super().run({**sampling_params, "seed": seed}, **kwargs)
