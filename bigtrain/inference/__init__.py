"""Trained models in use: `bigtrain.load`, and what it returns.

Open load.py first, then predictor.py. saved.py reads a checkpoint, ops.py finds
the ops for new pictures and texts, preprocessing.py runs them, and stablehlo.py
exports the model for serving. Nothing of the
training loop is imported here: neither main, step nor the optimizers, and of
inputs only labels.py. Only tools import this package; `bigtrain.load` leads
users to it.
"""
