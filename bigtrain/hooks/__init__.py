"""Hooks: code that a config runs between the steps of training.

Open early_stopping.py first; docs/hooks.md describes all methods.
bigtrain.runtime.hooks finds the modules by name, or a user's class by dotted
path, and runs them. No other module imports this package.

  config.hooks = {
    "early": dict(type="early_stopping", metric="val/loss", patience=3),
    "mine": dict(type="my_project.hooks.Printer", every=10),
  }

A hook has any of these methods and attributes:

  before_train(step)      before_step(step)      after_step(step)
  around_update(step, update, *args) -> the result of update(*args)
  after_row(step, row)    on process 0 only      before_save(step)
  keep_steps() -> steps whose checkpoints must not be deleted
  after_train(step, end)  `end` is a hook_context.End
  state() -> JSON         restore(state)
  needs_values: whether `after_step` reads `context.values`
  asks: whether it asks for something outside of `after_row`
  watches: names of the metrics that it reads
"""
