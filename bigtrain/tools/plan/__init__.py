"""Estimates memory, traffic and time of a config on many devices.

plan.py is the command: it compiles the update for simulated devices.
collectives.py reads from the compiled program what it sends, hardware.py has
published figures of accelerators, estimate.py combines both, table.py prints
the result, and placeholder_data.py replaces data that is not on this machine.
Nothing outside of this package imports it.
"""
