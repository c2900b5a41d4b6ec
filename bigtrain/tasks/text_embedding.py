"""Text embeddings: a query is near its answer and far from all others.

Axes: B batch, L length, n wrong answers of a query, E embedding.

A batch has "query" and "positive" int [B, L], ids with -1 for padding, and
optionally "negative" [B, (n,) L], wrong answers. The loss compares the whole
global batch, as in tasks/contrastive.py. config.model.pool makes embeddings.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import (
  Batch,
  Metrics,
  PaddedIds,
  PredictFn,
  Variables,
)
from bigtrain.config.errors import check_number
from bigtrain.losses import forward, pairwise
from bigtrain.step import frozen

_FEATURES = ("query", "positive", "negative")
# Options that may follow a schedule, with limits of their values.
LIMITS = dict(temperature=dict(above=0))


def inputs(batch: Batch) -> Batch:
  return _inputs(batch["query"])


def _inputs(ids_XL: jax.Array) -> Batch:
  return {"tokens": jnp.maximum(ids_XL, 0), "real": ids_XL >= 0}


def vocab_sizes(model: Any) -> dict[str, int]:
  return dict.fromkeys(_FEATURES, PaddedIds(model.vocab_size))


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
) -> tuple[dict[str, jax.Array], Any]:
  """Returns {feature: [B, (n,) E]}, and the mutable collections."""
  result = {}
  collected: Any = {}
  features = [name for name in _FEATURES if name in batch]
  for i, name in enumerate(features):
    ids = batch[name]
    texts = _inputs(ids.reshape(-1, ids.shape[-1]))
    rngs = None if rng is None else {"dropout": jax.random.fold_in(rng, i)}
    (_, out), new = forward.apply_unchanged(
      model, variables, **texts, head=False, train=train, rngs=rngs
    )
    collected = jax.tree.map(jnp.maximum, collected or new, new)
    z_XE = model.pooled(out["pre_logits"], texts["real"]).astype(jnp.float32)
    result[name] = z_XE.reshape(*ids.shape[:-1], -1)
  mutable = {
    name: x
    for name, x in variables.items()
    if name not in ("params", *frozen.NAMES)
  }
  return result, mutable | collected


def embeddings_loss_fn(
  params: Any,
  embeddings: dict[str, jax.Array],
  batch: Batch,
  *,
  temperature: float = 0.05,
  widths: Sequence[int] = (),
  chunk: int = 1024,
) -> Metrics:
  """Computes InfoNCE (arXiv 1807.03748), both ways, of the global batch.

  Args:
    temperature: divides the cosines.
    widths: numbers of leading entries that form embeddings by themselves (arXiv
      2205.13147); their losses are added up. By default, all entries.
    chunk: pairs of each query at a time, see losses/pairwise.py.

  Returns:
    Metrics "loss", and "accuracy" at the last width: the share of queries to
    which no other answer is nearer.
  """
  B, E = embeddings["query"].shape
  weight_B = metrics.example_weights(batch, embeddings["query"])
  total_B = jnp.zeros(B)
  for width in widths or (E,):
    check_number("config.loss.widths", width, least=1, most=E, whole=True)
    z = {name: _unit(x[..., :width]) for name, x in embeddings.items()}
    wrong = z.get("negative")
    loss_B, correct_B = pairwise.softmax(
      z["query"],
      z["positive"],
      jnp.float32(1 / temperature),
      negatives_BnE=None if wrong is None else wrong.reshape(B, -1, width),
      weight_B=weight_B,
      chunk=chunk,
    )
    total_B += loss_B
  result = {"loss": total_B, "accuracy": correct_B}
  return {name: metrics.pair(x, weight_B) for name, x in result.items()}


def _unit(x: jax.Array) -> jax.Array:
  return x / jnp.linalg.norm(x + 1e-30, axis=-1, keepdims=True)


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def predict_fns(model: Any) -> dict[str, PredictFn]:
  """Functions for evaluators: "text", the queries' embeddings, and "loss"."""

  def text(variables: Variables, batch: Batch) -> jax.Array:
    only = {"query": batch["query"]}
    z, _ = embed_fn(variables, only, None, model=model, train=False)
    return _unit(z["query"])

  return {"text": text, "loss": forward.metrics_fn(loss_fn, model=model)}
