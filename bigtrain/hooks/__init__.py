"""Hooks: code that a config can name to run it between training steps.

Open early_stopping.py first. bigtrain.runtime.hooks finds these modules by
name, or a user's class by its dotted path, and calls the hooks. No other module
imports this package. docs/hooks.md describes the methods of a hook.
"""
