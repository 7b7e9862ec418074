"""Arithmetic for worker groups: ranks, bundles, shardings, ports and dispatch of arguments. No Ray, no torch."""
