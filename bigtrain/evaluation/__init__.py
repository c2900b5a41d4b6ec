"""Evaluations: the entries of config.evals, and what evaluators are made of.

Open evaluations.py first: it checks the entries of a config, builds evaluators
when they are first due, and runs functions over the batches of an evaluation
set. text_metrics.py compares texts with references. The evaluators themselves
are modules of bigtrain.evaluators. main, tools.evaluate and the evaluators
import this package; it imports neither tasks nor models.
"""
