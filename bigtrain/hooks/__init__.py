"""Hooks: code that a config runs between the steps of training.

Open early_stopping.py first. bigtrain.runtime.hooks finds the modules by name
and runs the hooks. No other module imports this package.

  config.hooks = {
    "early": dict(type="early_stopping", metric="val/loss", patience=3),
    "mine": dict(type="my_project.hooks.Printer", every=10),
  }

`type` is the name of a module in this package, which has a class `Hook`, or the
dotted path of a user's class. The other options are the class's arguments. If
it has a parameter `context`, it also receives a runtime.hook_context.Context.

A hook has any of these methods and attributes; docs/hooks.md describes them:

  before_train(step)      before_step(step)      after_step(step)
  around_update(step, update, *args) -> the result of update(*args)
  after_row(step, row)    on process 0 only      before_save(step)
  keep_steps() -> steps whose checkpoints must not be deleted
  after_train(step, end)  `end` is a hook_context.End
  state() -> JSON         restore(state)

  needs_values: bool      whether `after_step` reads `context.values`
  asks: bool              whether it asks for something outside of `after_row`
  watches: names          metrics that it reads; the program warns if they
                          belong to an evaluation that does not exist
"""
