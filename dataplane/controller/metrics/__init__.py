"""What the controller counts while it works, and its export for Prometheus."""
