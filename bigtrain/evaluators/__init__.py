"""Evaluators: modules that `config.evals.<name>.type` can name.

Open mean.py first. bigtrain.evaluation finds the modules by name. Evaluators
never import a task or a model: they get a predict function.

  class Evaluator:
    def __init__(self, predict_fn, batches, context, **options): ...
    def run(self, variables, step) -> {name of a metric: value}

`__init__` compiles in the background while the run trains. It gets the options
of the config's entry, and whichever of these it has as parameters:

  predict_fn   (variables, batch, **options) -> anything; `pred` names it
  batches      the evaluation set, see evaluations.Batches; its options are
               `data`, `pp`, `batch_size`, `num_examples` and `cache`
  context      name, workdir, mesh and more, see evaluations.Context

`run` returns the same results on every process: numbers, the media of
reports.media, and metrics.Histograms.

When the program starts, options that are numbers are checked against an
optional table LIMITS, {option: arguments of check_number}. An optional function
`check(options, context, path)` checks other options, without opening the data.
"""
