"""Evaluations: the entries of config.evals, and what evaluators are made of.

Open evaluations.py first. text_metrics.py compares texts with references. The
evaluators themselves are modules of bigtrain.evaluators. main, tools.evaluate
and the evaluators import this package; it imports neither tasks nor models.
"""
