"""The checks of `tq doctor`: this machine, the installed packages, and a running service."""

from dataplane.cli.checks.finding import Finding as Finding
