"""Trained models in use: `bigtrain.load`, and what it returns.

load.py and predictor.py are the interface. saved.py reads a checkpoint, ops.py
finds the ops for new pictures and texts, preprocessing.py runs them, and
serving.py exports the model. Nothing of the training loop is imported here,
and only tools import this package.
"""
