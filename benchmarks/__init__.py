"""Benchmarks: how fast the program is, beside itself, its peers and the limits.

  python -m benchmarks.run [names...] [--quick]

Each script measures one row of the table in docs/benchmarks.md and prints one
JSON line a figure (see measure.py). None of them asserts a time.
"""
