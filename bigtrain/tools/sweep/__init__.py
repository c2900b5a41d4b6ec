"""Runs variants of a config, and compares their results.

sweep.py is the command. variants.py makes the configs from a grid or from
get_sweep, local.py and slurm.py run them, and results.py keeps the table.
"""
