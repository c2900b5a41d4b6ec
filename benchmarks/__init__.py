"""Benchmarks of speed and memory against peers and the machine's limits.

  python -m benchmarks.run [names...] [--quick]

Each script measures the figures of one number in the tables of
docs/benchmarks.md, and prints one JSON line per figure. Open run.py first, then
measure.py. No script asserts a time, and nothing imports benchmarks.
"""
