"""Losses as functions of arrays: no models, batches or configs.

Open cross_entropy.py first. linear_xent.py computes it from hidden states, a
few positions at a time, and token_losses.py applies it to language models.
Tasks and evaluators import these modules, which import arrays, config, metrics
and sharding.
"""
