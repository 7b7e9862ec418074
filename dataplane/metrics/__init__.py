"""What the service counts while it works, and how Prometheus reads it."""
