"""Services of the running loop: programs, phases, hooks, memory, debugging.

Open programs.py first: it compiles the update and the evaluations ahead of
time and records what each program costs. phases.py reports the loop's phases;
hooks.py calls the hooks of the config, which may read rows by
watched_metrics.py; host_memory.py tunes malloc; debugging.py logs shapes.
main, reports, hooks and tools import this package.
"""
