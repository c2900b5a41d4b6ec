"""Tasks: what a model is trained to do, one module for each `config.task`.

A task has pure functions: `inputs`, a batch's arguments for the model;
`loss_fn`, metrics (bigtrain/metrics.py) with "loss" as a (sum, weight) pair;
and `predict_fns`, functions for evaluators by name. A batch's "_mask" is 0 for
padding.

A task may also have `vocab_sizes(model)` and `class_counts(model)`, with which
the input refuses ids and labels that are too large; `LIMITS`, arguments of
config.errors.check_number for options of the loss; `init_state` and
`update_state`, for state besides the parameters; `gradients_fn`, see
docs/training.md; and `select`, which chooses the examples to learn from, see
objective/selection.py. Open classification.py first. Tasks are loaded by name
(config/modules.py), and no other module imports them. They import losses, text,
step and metrics, never models.
"""
