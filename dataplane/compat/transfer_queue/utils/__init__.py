"""Helpers of the original package that its users import."""
