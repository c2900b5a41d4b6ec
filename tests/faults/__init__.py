"""Faults injected into processes of the whole program."""
