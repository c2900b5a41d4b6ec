"""Tasks: what a model is trained to do, one module for each `config.task`.

A task has three pure functions: `inputs`, a batch's arguments for the model;
`loss_fn`, metrics as (sum, weight) pairs, among them "loss"; and `predict_fns`,
functions for evaluators by name. `vocab_sizes` is optional: ids that features
of a batch may have. Open classification.py first, the shortest. Tasks are
loaded by name (bigtrain/parts.py) and no other module imports them; they import
losses, decoding, metrics and settings, never models.
"""
