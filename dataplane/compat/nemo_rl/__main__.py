"""`python -m dataplane.compat.nemo_rl -m MODULE ...`, or SCRIPT: runs it where NeMo-RL's adapter is this package's."""

from dataplane.compat.nemo_rl.factory import ADAPTER
from dataplane.compat.starting import start

if __name__ == "__main__":
    start(ADAPTER)
