"""Evaluators: modules that `config.evals.<name>.type` can name.

Open mean.py first, the shortest one. bigtrain.evaluation finds the modules by
name, and a user's own by their dotted paths. They import bigtrain.evaluation
and what lies below it, never a task or a model.

  class Evaluator:
    def __init__(self, predict_fn, batches, context, **options): ...
    def run(self, variables, step) -> {name of a metric: value}

`__init__` loads data and compiles, in the background while the run trains. It
receives each of the first three arguments that it has a parameter for, and the
options of the config's entry:

  predict_fn   (variables, batch, **options) -> anything, named by `pred`
  batches      the evaluation set (evaluations.Batches), with the options
               `data`, `pp`, `batch_size`, `num_examples` and `cache`, except
               those that `__init__` has parameters for. `batches.map(fn)`
               compiles fn(variables, batch) and returns a function of the
               variables, whose result is the list of fn's results.
               batch["_mask"] is 1 for examples and 0 for padding.
               `batches.collect(fn)` returns the rows of all examples instead.
  context      name, workdir, mesh and more of the run (evaluations.Context)

`run` is called on every process and returns the same result on each: numbers,
or an Image, Text or Table of reports.media, or a metrics.Histogram.

A module may also have a function `check(options, context, path)`, called when
the program starts. It raises ConfigError for options that it can refuse without
opening the data: a missing file must not end a run after hours.
"""
