"""Faults injected into real processes of the program."""
