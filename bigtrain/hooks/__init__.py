"""Hooks: code that runs between the steps of training if a config names it.

Open early_stopping.py first. bigtrain.runtime.hooks finds these modules by
name, or a user's class by its dotted path, and calls the hooks. No other module
imports this package. docs/hooks.md describes the methods of a hook.
"""
