"""Using trained models: `bigtrain.load` and the `Predictor` that it returns.

load.py and predictor.py are the interface. saved.py reads a checkpoint, ops.py
finds the preprocessing ops for new pictures and texts, preprocessing.py runs
them, and serving.py exports a model. Nothing of the training loop is imported
here, and only tools import this package.
"""
