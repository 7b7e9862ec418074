"""The systems under measurement: one adapter each."""
