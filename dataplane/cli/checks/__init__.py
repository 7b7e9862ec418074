"""What `tq doctor` looks at: this machine, what is installed on it, and a service at work."""

from dataplane.cli.checks.finding import Finding as Finding
