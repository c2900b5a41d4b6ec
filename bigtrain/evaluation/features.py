"""Features of examples, for evaluators that compare or classify them.

Legend: N examples, D features.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import DataError
from bigtrain.evaluation.evaluations import Batches

# Features [N, D] and labels int [N], or of patches and pixels: [N, ...].
Examples = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Splits(Batches):
  """Training examples, and test examples, which are preprocessed alike."""

  test_data: Mapping[str, Any]  # Source of the test examples.
  # Name of the classes, int [B], or [B, H, W] of pixels; negative for none.
  label_key: str = "label"
  num_test_examples: int | None = None  # From the start; all by default.

  def scores(
    self,
    predict_fn: PredictFn,
    score: Callable[[Examples, Examples], dict[str, float]],
  ) -> Callable[[Variables, int], dict[str, float]]:
    """The `run` that scores features of the examples with a label.

    The predict function returns features [B, ...] or, of several layers, a dict
    of them; then the results are "<layer>/<metric>".
    """

    def outputs(variables: Variables, batch: Batch) -> Any:
      label = batch[self.label_key]

      def of_layer(x: jax.Array) -> jax.Array:
        # Labels of pixels are for features of patches.
        shape = x.shape if label.ndim > 1 else (x.shape[0], -1)
        return x.astype(jnp.float32).reshape(shape)

      return jax.tree.map(of_layer, predict_fn(variables, batch)), label

    # Any classes: a probe has a head of its own.
    train = self.labelled(self.label_key, None)
    test = train.replace(
      data=self.test_data, num_examples=self.num_test_examples
    )
    collect = [split.collect(outputs) for split in (train, test)]

    def run(variables: Variables, step: int) -> dict[str, float]:
      splits: list[dict[str, Examples]] = []
      for features, labels in (split(variables) for split in collect):
        real_N = (labels >= 0).reshape(len(labels), -1).any(1)
        if not real_N.any():
          raise DataError(f"{self.context.path}: no example has a label.")
        real = labels[real_N].astype(np.int32)
        layers = trees.flatten_with_names(features)
        splits.append({name: (x[real_N], real) for name, x in layers})
      results: dict[str, float] = {}
      for name, train in splits[0].items():
        test = splits[1][name]
        values = score(train, test) | metrics.nonfinite(train[0], test[0])
        results |= {f"{name}/{k}" if name else k: v for k, v in values.items()}
      return results

    return run


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
