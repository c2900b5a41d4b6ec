"""The config of a run: reading it, checking it, and what it names.

Open settings.py first: `Config` records every key that is read, so that a
misspelled one is an error. errors.py has the errors of users' mistakes, their
hints and the common checks; loading.py loads config files and applies changes
from the command line; lengths.py reads lengths with units; modules.py finds the
modules and functions that a config names; flexi.py reads values that each step
draws; choices.py keeps what "auto" became. Every package may import this one.
"""
