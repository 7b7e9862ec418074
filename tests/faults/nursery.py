"""Makes victims quickly: a process that has imported everything and forks one for each line of settings it is given.

`python -m tests.faults.nursery ADDRESS`; prints "ready" at first, and "dead" when a victim is.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from tests.faults import victim


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                victim.main(sys.argv[1], json.loads(line), lambda text: print(text, flush=True))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
