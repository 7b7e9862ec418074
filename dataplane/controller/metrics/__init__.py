"""Counters of the controller and their export to Prometheus."""
