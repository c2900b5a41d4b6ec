"""A user's task: classification, with the ids of the examples in the rows.

Legend: B batch.
"""

from bigtrain.tasks import classification
from bigtrain.tasks.classification import inputs, predict_fns

__all__ = ["inputs", "loss_fn", "predict_fns"]


def loss_fn(variables, batch, rng, **options):
  """Classification's loss_fn, plus the mean id at each batch index."""
  pairs, mutable = classification.loss_fn(variables, batch, rng, **options)
  id_B = batch["id"].astype("float32")
  for i in range(id_B.shape[0]):
    pairs[f"id_{i}"] = id_B[i], 1.0
  return pairs, mutable
