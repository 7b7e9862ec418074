"""The dashboard: its JSON interface and its static files."""
