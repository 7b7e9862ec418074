"""`python -m dataplane.compat.transfer_queue -m MODULE ...` (or SCRIPT): run it with ours as `transfer_queue`."""

from dataplane.compat.switch import start

if __name__ == "__main__":
    start("transfer_queue")
