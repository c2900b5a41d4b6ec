"""Evaluators: modules that `config.evals.<name>.type` can name.

Open mean.py first. bigtrain.evaluation finds the modules by name. They import
what lies below it, never a task or a model.

  class Evaluator:
    def __init__(self, predict_fn, batches, context, **options): ...
    def run(self, variables, step) -> {name of a metric: value}

`__init__` compiles in the background while the run trains. It receives those of
the first three arguments that it names, and the options of the config's entry:

  predict_fn   (variables, batch, **options) -> anything, named by `pred`
  batches      the evaluation set, see evaluations.Batches; its options are
               `data`, `pp`, `batch_size`, `num_examples` and `cache`
  context      name, workdir, mesh and more, see evaluations.Context

`run` returns on every process the same numbers, media of reports.media and
metrics.Histograms. When the program starts, numbers are checked by an optional
table LIMITS, {option: limits of check_number}, and other options by an
optional `check(options, context, path)`, which does not open the data.
"""
