"""Hooks: code that a config runs between the steps of training.

Open early_stopping.py first. bigtrain.runtime.hooks finds the modules by name,
or a user's class by dotted path, and runs them. No other module imports this
package. docs/hooks.md describes the methods and attributes of a hook.
"""
