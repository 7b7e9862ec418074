"""The page for people: its JSON, and the static files that show it."""
