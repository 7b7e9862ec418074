"""The modules of `examples/grpo_arithmetic.py`; see the table in that file."""
