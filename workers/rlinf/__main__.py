"""`python -m workers.rlinf -m MODULE ...`, or SCRIPT: runs it where this is `rlinf.scheduler`."""

from dataplane.compat.starting import start

if __name__ == "__main__":
    start("rlinf.scheduler")
