"""What this data plane costs, measured beside its peers and the machine's own limits. Run with `make bench`."""
