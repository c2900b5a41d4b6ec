"""Features of examples, for evaluators that compare or classify them.

`Splits` collects features and labels of training and test examples, for probes
and nearest neighbours; `of_all` collects only features, and `moments_of_all`
keeps only their mean and covariance. `in_chunks` runs an evaluator's own
function on many host arrays, a part at a time.

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
from bigtrain.evaluation.frechet import Moments

# Features [N, D] and labels int [N], or of patches and pixels: [N, ...].
Examples = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Splits(Batches):
  """Training examples and test examples, preprocessed in the same way."""

  test_data: Mapping[str, Any]  # Source of the test examples.
  # Name of the labels: int [B], or [B, H, W] of pixels; negative for none.
  label_key: str = "label"
  num_test_examples: int | None = None  # The first ones; by default all.

  @property
  def _seed(self) -> int:
    # With one seed, random ops would treat training and test example i alike:
    # with the same noise, they would be neighbours.
    return int(self.data is self.test_data)

  def scores(
    self,
    predict_fn: PredictFn,
    score: Callable[[Examples, Examples], dict[str, float]],
  ) -> Callable[[Variables, int], dict[str, float]]:
    """Returns the `run` of an evaluator: scores of the labelled examples.

    The predict function returns features [B, ...], or a dict with the features
    of each layer. With a dict, the results are named "<layer>/<metric>".
    """

    def outputs(variables: Variables, batch: Batch) -> Any:
      label = batch[self.label_key]

      def of_layer(x: jax.Array) -> jax.Array:
        # Labels of pixels are for features of patches.
        shape = x.shape if label.ndim > 1 else (x.shape[0], -1)
        return x.astype(jnp.float32).reshape(shape)

      return jax.tree.map(of_layer, predict_fn(variables, batch)), label

    # Any number of classes, because a probe has its own head.
    train_batches = self.labelled(self.label_key, None)
    test_batches = train_batches.replace(
      data=self.test_data, num_examples=self.num_test_examples
    )
    collect_train = train_batches.collect(outputs)
    collect_test = test_batches.collect(outputs)

    def run(variables: Variables, step: int) -> dict[str, float]:
      train_layers = self._labelled_examples(*collect_train(variables))
      test_layers = self._labelled_examples(*collect_test(variables))
      results: dict[str, float] = {}
      for layer, train in train_layers.items():
        test = test_layers[layer]
        values = score(train, test) | metrics.nonfinite(train[0], test[0])
        for name, value in values.items():
          results[f"{layer}/{name}" if layer else name] = value
      return results

    return run

  def _labelled_examples(
    self, features: Any, labels: np.ndarray
  ) -> dict[str, Examples]:
    """Features and labels of the labelled examples, by layer."""
    has_label_N = (labels >= 0).reshape(len(labels), -1).any(1)
    if not has_label_N.any():
      raise DataError(f"{self.context.path}: no example has a label.")
    kept_labels = labels[has_label_N].astype(np.int32)
    return {
      layer: (x[has_label_N], kept_labels)
      for layer, x in trees.flatten_with_names(features)
    }


def of_all(
  predict_fn: PredictFn, batches: Batches
) -> Callable[[Variables], dict[str, np.ndarray]]:
  """Features [N, D] of all examples, by layer. A single layer is named ""."""

  def outputs(variables: Variables, batch: Batch) -> Any:
    flat = lambda x: x.astype(jnp.float32).reshape(x.shape[0], -1)
    return jax.tree.map(flat, predict_fn(variables, batch))

  collect = batches.collect(outputs)
  return lambda variables: dict(trees.flatten_with_names(collect(variables)))


def moments_of_all(
  predict_fn: PredictFn, batches: Batches
) -> Callable[[Variables], dict[str, Moments]]:
  """Moments of the features of all examples, by layer, as in `of_all`."""

  def outputs(variables: Variables, batch: Batch) -> tuple[Any, jax.Array]:
    flat = lambda x: x.astype(jnp.float32).reshape(x.shape[0], -1)
    return jax.tree.map(flat, predict_fn(variables, batch)), batch["_mask"]

  each = batches.each(outputs)

  def run(variables: Variables) -> dict[str, Moments]:
    result: dict[str, Moments] = {}
    for layers, mask_B in each(variables):
      for name, x_BD in trees.flatten_with_names(layers):
        result.setdefault(name, Moments()).add(x_BD[mask_B > 0])
    return result

  return run


def in_chunks(
  fn: Callable[..., Any], mesh: Mesh, chunk_size: int = 1024
) -> Callable[..., Any]:
  """Compiles fn(examples, *others), to call it on chunks of many examples.

  The examples are host arrays [N, ...], and so are the results. The function
  gets about `chunk_size` examples at a time, split over the devices, and the
  other arguments as they are. If the returned function is called with an
  argument `static`, which is not an array, this becomes the last argument of
  fn.
  """
  ways = sharding.batch_ways(mesh)
  replicated = sharding.replicated(mesh)

  def of_chunk(static: Any, chunk: Any, *others: Any) -> Any:
    chunk = jax.lax.with_sharding_constraint(chunk, sharding.batch(mesh))
    if static is None:
      return fn(chunk, *others)
    return fn(chunk, *others, static)

  compiled = jax.jit(
    of_chunk,
    static_argnums=0,
    in_shardings=replicated,
    out_shardings=replicated,
  )

  def run(examples: Any, *others: Any, static: Any = None) -> Any:
    total = len(jax.tree.leaves(examples)[0])
    # A multiple of the devices, and not much more than there are examples.
    size = ways * max(1, min(chunk_size, total + ways - 1) // ways)
    others = jax.device_put(others, replicated)
    results = []
    for start in range(0, total, size):
      # All chunks have the same size: the last example fills the last one.
      index = np.minimum(np.arange(start, start + size), total - 1)
      chunk = jax.tree.map(lambda x, index=index: x[index], examples)
      results.append(compiled(static, chunk, *others))

    def join(*parts: np.ndarray) -> np.ndarray:
      return np.concatenate(parts)[:total]

    return jax.tree.map(join, *jax.device_get(results))

  return run
