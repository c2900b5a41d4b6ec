"""Estimates memory, traffic and time of a config on many devices.

plan.py is the command; open it first. meshes.py changes the config for a mesh.
program.py compiles its update for simulated or absent devices. hlo.py parses
the compiled program; collectives.py, groups.py, products.py and cycles.py read
from it what it sends and computes. hardware.py has published figures of
accelerators, and estimate.py combines both. formulae.py has the traffic without
a compiler, with which search.py looks for the fastest mesh that fits. table.py
prints the result.
"""
