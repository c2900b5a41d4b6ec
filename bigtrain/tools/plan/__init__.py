"""Estimates memory, traffic and time of a config on many devices.

plan.py is the command; open it first. meshes.py changes the config for a mesh,
program.py compiles its update for simulated or absent devices, hlo.py reads
what the program sends and computes, hardware.py has published figures of
accelerators, estimate.py combines both, search.py looks for the fastest mesh
that fits, and table.py with table.jinja prints the result.
"""
