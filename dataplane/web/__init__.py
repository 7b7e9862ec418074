"""What a service shows over HTTP: its page, its state as JSON, its metrics."""
