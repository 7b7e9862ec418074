"""The directory of one job: registered groups, workers and channels, their endpoints, and their ends.

`Directory` serves it from a thread of one process. `DirectoryClient` connects to it from any process, with or
without Ray.
"""

from workers.directory.client import DIRECTORY_VARIABLE, DirectoryClient
from workers.directory.server import Directory
from workers.directory.wire import DirectoryEntry, EntryState, Facts, Kind

__all__ = ["DIRECTORY_VARIABLE", "Directory", "DirectoryClient", "DirectoryEntry", "Facts", "Kind", "EntryState"]
