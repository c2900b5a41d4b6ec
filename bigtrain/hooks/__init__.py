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
receives a `bigtrain.runtime.hooks.Context` with the hook's name, the workdir
and the path of the hook in the config.

A hook sees steps and rows, never the state. It has any of these methods:

  before_train(step)         Called once, before the first step of a process.
  before_step(step)          Called before each step; steps count from 1.
  after_step(step, row)      Called with each row, of training and of
                             evaluations, with the names of metrics.jsonl. A
                             returned string stops the run; it is the reason.
  wants_save(step) -> bool   Asks for a checkpoint of the current state.
  before_save(step)          Called before each checkpoint.
  keep_steps() -> steps      Steps whose checkpoints must not be deleted.
  after_train(step)          Called once, after the last step.
  state() -> JSON            Saved with each checkpoint.
  restore(state)             Called with the saved state after a restart.

and these attributes:

  failure: bool              Whether a run that this hook stops has failed. By
                             default it has succeeded.
  watches: names             Metrics that the hook reads; the program warns if
                             they belong to an evaluation that does not exist.

A run that a hook has stopped stays stopped when it is started again, until
`config.hooks` changes. Each process builds the hooks and calls them at every
step, but only process 0 calls `after_step` and `wants_save`; all processes
follow its decisions. Every row is shown once, also across restarts.
"""
