"""Tasks: what a model is trained to do, one module for each `config.task`.

A task has three pure functions: `inputs`, a batch's arguments for the model;
`loss_fn`, metrics (bigtrain/metrics.py), among them "loss" as a (sum, weight)
pair; and `predict_fns`, functions for evaluators by name. They take the
variables, "params" and mutable collections of the flax module `model`; a batch
as the task's docstring describes it, whose "_mask" is 0 for padding; and
`loss_fn` a key for dropout and the like, which are on with `train`.

Three more are optional: `vocab_sizes(model)` returns {feature of a batch:
vocabulary size} and `class_counts` {feature: number of classes}, so that the
input refuses other numbers before they reach a device; `gradients_fn` replaces
`step.gradients.make`, see docs/training.md. Open classification.py first, the
shortest. Tasks are loaded by name (parts.py) and no other module imports them;
they import losses, decoding, step, metrics and settings, never models.
"""
