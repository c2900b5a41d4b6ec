"""Features of examples, for evaluators that compare or classify them.

Legend: N examples, D features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding, trees
from bigtrain.evaluation.evaluations import Batches
from bigtrain.settings import DataError
from bigtrain.types import Batch, PredictFn, Variables

# Features [N, D] and labels int [N], or of patches and pixels: [N, ...].
Examples = tuple[np.ndarray, np.ndarray]


def of_splits(
  predict_fn: PredictFn,
  batches: Batches,
  test_data: Mapping[str, Any],
  num_test_examples: int | None,
  label_key: str,
  score: Callable[[Examples, Examples], dict[str, float]],
) -> Callable[[Variables], dict[str, float]]:
  """Scores the features of training and test examples that have a label.

  The predict function returns features [B, ...] or, of several layers, a dict
  of them; then the results are "<layer>/<metric>".
  """

  def outputs(variables: Variables, batch: Batch) -> Any:
    label = batch[label_key]

    def of_layer(x: jax.Array) -> jax.Array:
      # Labels of pixels are for features of patches.
      shape = x.shape if label.ndim > 1 else (x.shape[0], -1)
      return x.astype(jnp.float32).reshape(shape)

    return jax.tree.map(of_layer, predict_fn(variables, batch)), label

  # Any classes: a probe has a head of its own.
  batches = batches.labelled(label_key, None)
  test_batches = batches.replace(data=test_data, num_examples=num_test_examples)
  collect = [split.collect(outputs) for split in (batches, test_batches)]

  def scores(variables: Variables) -> dict[str, float]:
    splits: list[dict[str, Examples]] = []
    for features, labels in (split(variables) for split in collect):
      real_N = (labels >= 0).reshape(len(labels), -1).any(1)
      if not real_N.any():
        raise DataError(f"{batches.context.path}: no example has a label.")
      real = labels[real_N].astype(np.int32)
      layers = trees.flatten_with_names(features)
      splits.append({name: (x[real_N], real) for name, x in layers})
    results: dict[str, float] = {}
    for name, train in splits[0].items():
      test = splits[1][name]
      values = score(train, test)
      if nonfinite := metrics.num_nonfinite(train[0], test[0]):
        values["nonfinite"] = nonfinite
      results |= {f"{name}/{k}" if name else k: v for k, v in values.items()}
    return results

  return scores


def of_all(
  predict_fn: PredictFn, batches: Batches
) -> Callable[[Variables], dict[str, np.ndarray]]:
  """Features [N, D] of all examples, by layer; the name of one alone is ""."""

  def outputs(variables: Variables, batch: Batch) -> Any:
    flat = lambda x: x.astype(jnp.float32).reshape(x.shape[0], -1)
    return jax.tree.map(flat, predict_fn(variables, batch))

  collect = batches.collect(outputs)
  return lambda variables: dict(trees.flatten_with_names(collect(variables)))


def by_rows(
  fn: Callable[..., Any], mesh: Mesh, num_rows: int = 1024
) -> Callable[..., Any]:
  """Compiles fn(rows, *others) -> tree of [N, ...], for host arrays [N, ...].

  It sees about `num_rows` at a time, the last ones several times, split over
  the devices. `static` is a last argument that is no array.
  """
  ways, replicated = sharding.batch_ways(mesh), sharding.replicated(mesh)

  def of_chunk(static: Any, rows: Any, *others: Any) -> Any:
    split = sharding.batch(mesh)
    rows = jax.lax.with_sharding_constraint(rows, split)
    return fn(rows, *others, *(() if static is None else (static,)))

  compiled = jax.jit(
    of_chunk,
    static_argnums=0,
    in_shardings=replicated,
    out_shardings=replicated,
  )

  def run(rows: Any, *others: Any, static: Any = None) -> Any:
    total = len(jax.tree.leaves(rows)[0])
    size = ways * max(1, min(num_rows, total + ways - 1) // ways)
    others = jax.device_put(others, replicated)
    results = []
    for start in range(0, total, size):
      index = np.minimum(np.arange(start, start + size), total - 1)
      chunk = jax.tree.map(lambda x, index=index: x[index], rows)
      results.append(compiled(static, chunk, *others))
    join = lambda *parts: np.concatenate(parts)[:total]
    return jax.tree.map(join, *jax.device_get(results))

  return run
