"""`python -m dataplane.compat.nemo_rl -m MODULE ...`, or SCRIPT: runs it where NeMo-RL's adapter is this package's."""

from dataplane.compat.starting import start

if __name__ == "__main__":
    start("nemo_rl.data_plane.adapters.transfer_queue")
