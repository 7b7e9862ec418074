"""Messages between the workers of a job; `Messenger` is one worker's end."""

from workers.messages.groups import participants
from workers.messages.messenger import Messenger, WithPayload
from workers.messages.options import CollectiveGroupOptions
from workers.messages.work import AsyncWork, all_of

__all__ = ["AsyncWork", "CollectiveGroupOptions", "Messenger", "WithPayload", "all_of", "participants"]
