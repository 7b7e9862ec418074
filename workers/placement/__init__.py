"""Arithmetic of worker groups: ranks, bundles, shardings, ports, and which rows go where. No Ray, no torch."""
