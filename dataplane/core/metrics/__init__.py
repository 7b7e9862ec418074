"""The table of the service's metrics, and the counters and histograms that they are kept in."""
