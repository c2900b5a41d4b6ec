"""Using trained models: `bigtrain.load` and the `Predictor` that it returns.

load.py and predictor.py are the interface. saved.py reads a checkpoint, ops.py
finds the preprocessing ops for new pictures and texts, preprocessing.py runs
them, and serving.py exports a model. This package imports nothing of the
training loop, and only tools import it.
"""
