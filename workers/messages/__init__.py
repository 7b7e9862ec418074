"""Messages between the workers of a job; `Messenger` is one worker's end."""

from workers.messages.async_work import AsyncWork, all_of
from workers.messages.messenger import Messenger, WithPayload, participants
from workers.messages.wire import CollectiveGroupOptions

__all__ = ["AsyncWork", "CollectiveGroupOptions", "Messenger", "WithPayload", "all_of", "participants"]
