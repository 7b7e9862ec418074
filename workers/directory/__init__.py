"""The directory of one job: who is there, where to reach them, and who is gone.

`Directory` serves it from a thread of one process; `DirectoryClient` speaks to it from any other, with or without Ray.
"""

from workers.directory.client import DIRECTORY_VARIABLE, DirectoryClient
from workers.directory.server import Directory
from workers.directory.wire import DirectoryEntry, EntryState, Facts, Kind

__all__ = ["DIRECTORY_VARIABLE", "Directory", "DirectoryClient", "DirectoryEntry", "Facts", "Kind", "EntryState"]
