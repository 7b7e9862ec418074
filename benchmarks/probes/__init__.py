"""Measurements of this project alone: latencies, growth, memory and processor time of the service."""
