"""The catalogue of the service's metrics, and the counters and histograms that store them."""
