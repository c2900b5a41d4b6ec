"""Hooks: code that a config runs between the steps of training.

Each module of this package is one type of hook that `config.hooks` can name;
open early_stopping.py first. bigtrain.runtime.hooks finds the modules by name
and runs the hooks. No other module imports this package.

  config.hooks = {
    "early": dict(type="early_stopping", metric="val/loss", patience=3),
    "best": dict(type="checkpoint_best", metric="val/acc", mode="max"),
    "mine": dict(type="my_project.hooks.Printer", every=10),
  }

`type` is the name of a module in this package, which has a class `Hook`, or the
dotted path of a class of the user's own. The other options are the keyword
arguments of the class. If its `__init__` has a parameter `context`, it also
receives a `bigtrain.runtime.hook_context.Context`: the state, the predict
functions and the config to read, and methods to add scalars to rows and to ask
for a save, an evaluation or a stop. docs/hooks.md has an example.

A hook has any of these methods. Every process calls all but `after_row`, in the
order of the config:

  before_train(step)      Called before the first step of a process; `step` is
                          the number of updates so far.
  before_step(step)       Called before each step; steps count from 1.
  around_update(step, update, *args) -> result
                          Called in place of update(*args), which computes the
                          step: the arguments are state, tally, batch and fixed
                          variables, the result is (state, tally). It calls
                          `update`, which overwrites the state that it is given.
                          The first hook of the config is the outermost.
  after_step(step)        Called after each step. The device may still compute
                          the step: nothing has waited for it.
  after_row(step, row)    Called on process 0 with each row, of training and of
                          evaluations, with the names of metrics.jsonl. The row
                          of a step often follows after the next step.
  before_save(step)       Called before each checkpoint.
  keep_steps() -> steps   Steps whose checkpoints must not be deleted.
  after_train(step, end)  Called at the end, also after an exception, a signal
                          or a rollback: `end` is a hook_context.End.
  state() -> JSON         Saved with each checkpoint, by process 0.
  restore(state)          Called with the saved state after a restart.

and these attributes:

  needs_values: bool      Whether `after_step` reads `context.values`. The loop
                          then waits for each step. False by default.
  asks: bool              Whether the hook asks for a save, an evaluation or a
                          stop outside of `after_row`. With several processes,
                          each step then has a message from process 0 to the
                          others. False by default.
  watches: names          Metrics that the hook reads; the program warns if
                          they belong to an evaluation that does not exist.

Process 0 decides: what its hooks ask for happens on all processes, and what the
hooks of other processes ask for does not. A run that a hook has stopped stays
stopped when it is started again, until `config.hooks` changes. Every row is
shown once, also across restarts.
"""
