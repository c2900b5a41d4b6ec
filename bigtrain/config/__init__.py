"""Reads and checks the config of a run, and finds the modules that it names.

Open settings.py first: `Config` records every key that is read, so that a
misspelled key becomes an error. loading.py loads config files and applies
changes from the command line. errors.py has the exceptions for users' mistakes,
their hints and the common checks. lengths.py converts lengths in epochs, tokens
and other units to steps. modules.py imports the modules and functions that a
config names. flexi.py reads values that every step draws at random,
piecewise.py reads numbers that change during a run, and choices.py records what
the program chose for "auto". Every package may import this one.
"""
