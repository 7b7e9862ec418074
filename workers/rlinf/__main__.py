"""`python -m workers.rlinf -m MODULE ...` (or SCRIPT): run it with `rlinf.scheduler` replaced by this package."""

from dataplane.compat.switch import start

if __name__ == "__main__":
    start("rlinf.scheduler")
