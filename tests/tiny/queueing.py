"""A user's task that compares the images of a batch with those of earlier ones.

Legend: B batch, C classes, Q queue.
"""

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.losses import forward
from bigtrain.tasks import classification

inputs = classification.inputs
predict_fns = classification.predict_fns


def init_state(params, *, queue_size=24):
  return {"queue_QC": jnp.zeros((queue_size, params["head"]["bias"].size))}


def update_state(state, *, params, sums):
  queue_QC = jnp.concatenate([sums["newest_BC"], state["queue_QC"]])
  return {"queue_QC": queue_QC[: len(state["queue_QC"])]}


def embed_fn(variables, batch, rng, *, model, train):
  (logits_BC, _), mutable = forward.apply(
    model, variables, rng, train, **inputs(batch)
  )
  return logits_BC, mutable


def embeddings_loss_fn(params, z_BC, batch, *, state, temperature=1.0):
  score_BQ = z_BC @ state["queue_QC"].T / temperature
  positive_B = jnp.sum(jnp.square(z_BC - jnp.roll(z_BC, 1, 0)), -1)
  loss_B = positive_B + jax.nn.logsumexp(score_BQ, -1)
  return {"loss": metrics.pair(loss_B)}, {"newest_BC": z_BC}


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)
