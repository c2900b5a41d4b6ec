"""Evaluations: the entries of config.evals, and what evaluators share.

Open evaluations.py first: it checks the entries and makes the evaluators'
batches. features.py collects features of examples, and text_metrics.py compares
texts with references. The evaluators themselves are modules of
bigtrain.evaluators. main, tools.evaluate and the evaluators import this
package; it imports neither tasks nor models.
"""
