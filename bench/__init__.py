"""Benchmarks: `python -m bench [NAME ...]`. How to write one: bench/harness.py."""
