"""Adapters of the systems under measurement."""
