"""Measurements of this project without peers: latencies, growth, memory and processor time of the service."""
