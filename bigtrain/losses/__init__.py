"""Losses as functions of arrays: no models, batches or configs.

Open cross_entropy.py first: softmax and sigmoid cross-entropy by class.
linear_xent.py computes the former from hidden states, a few positions at a
time, token_losses.py applies a language model and adds the experts' terms,
pairwise.py compares all images and texts of a global batch, and distances.py a
student's logits with its teacher's; mixup.py blends examples. Tasks and
evaluators import these modules; they import settings, metrics and sharding.
"""
