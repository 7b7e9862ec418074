"""Helper modules of the original package that its users import."""
