"""The cost of this data plane, measured beside its peers and the limits of the machine. Run with `make bench`."""
