"""Evaluators: modules that `config.evals.<name>.type` can name.

Each module has a class `Evaluator`; open mean.py first, the shortest one.
bigtrain.evaluation finds the modules by name and builds the evaluators. They
import bigtrain.evaluation and what lies below it, never a task or a model, and
no other module imports them. A user's own evaluator is a module elsewhere,
named by its dotted path.

  class Evaluator:
    def __init__(self, predict_fn, batches, context, **options): ...
    def run(self, variables, step) -> {name of a metric: value}

`__init__` receives each of the first three arguments that it has a parameter
for, and the options of the config's entry as keyword arguments:

  predict_fn   One of the task's predict functions, named by the entry's `pred`:
               (variables, batch, **options) -> anything.
  batches      The evaluation set, a `bigtrain.evaluation.evaluations.Batches`.
               It takes the options `data`, `pp`, `batch_size`, `num_examples`
               and `cache`, except those that `__init__` has parameters for.
               `batches.map(fn)` compiles fn(variables, batch) and returns a
               function of the variables, whose result is the list of fn's
               results. Examples have weight 1 in batch["_mask"], padding has 0.
               `batches.collect(fn)` returns the rows of all examples instead.
  context      Name, workdir, mesh and more of the run, an
               `evaluations.Context`.

`__init__` loads data and compiles, in the background while the run trains.
`run` is called on every process and returns the same result on each. A value is
a number, or one of the following, which a file in the workdir holds and the
loggers and tools.report show:

  reports.media.Image(pixels, caption)   pixels [height, width, channels]
  reports.media.Text(text)
  reports.media.Table(rows)              rows: a list of dicts
  metrics.Histogram                      as `metrics.host_values` returns it

A module may also have a function `check(options, context, path)`. It is called
when the program starts and raises ConfigError for options that it can refuse
without opening the data: a missing file must not end a run after hours.
"""
