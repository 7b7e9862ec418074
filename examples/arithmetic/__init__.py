"""The parts of `examples/grpo_arithmetic.py`, one file each; see the table in that file."""
