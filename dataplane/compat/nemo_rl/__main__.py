"""`python -m dataplane.compat.nemo_rl -m MODULE ...` (or SCRIPT): run it with NeMo-RL's adapter replaced by ours."""

from dataplane.compat.nemo_rl.client import ADAPTER
from dataplane.compat.switch import start

if __name__ == "__main__":
    start(ADAPTER)
