"""Benchmarks of speed and memory against peers and the machine's limits.

  python -m benchmarks.run [names...] [--quick]

Each script measures one row of the table in docs/benchmarks.md and prints one
JSON line per figure; open run.py first, then measure.py. None of them asserts a
time. Nothing imports benchmarks.
"""
