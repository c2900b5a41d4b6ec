"""The engine that runs ops in the threads of tf.data, mainly for images.

The order of examples and the reading stay in Python; everything after that is a
tf.data graph:

  numbers of calls -> read, for each part -> unbatch -> ops -> choose -> batch
                      (numpy_function)                 (graph) (mixture)
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.data.formats import files
from bigtrain.inputs import engine, order
from bigtrain.inputs.engine import Batch, FeatureTypes, Part
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op

# Rows per call from the graph into Python: enough to make the cost of the call
# small, and few enough for several reads to overlap.
_ROWS_PER_READ = 32
_PARALLEL_READS = 8
# Examples in preparation for each thread. A result that waits for an earlier
# one still counts as a call: with one call per thread, threads would be idle
# behind each slow image.
_CALLS_PER_THREAD = 4


class TfEngine(engine.Engine):
  """Reads records in Python, many per call; a tf.data graph does the rest."""

  def __init__(self, parts: Sequence[Part], *args: Any, **kwargs: Any):
    self._codecs = [_Codec(part.source.spec, part.op.draws) for part in parts]
    # Graphs of the ops, of one example.
    self._graphs = [
      self._graph(part, codec) for part, codec in zip(parts, self._codecs)
    ]
    super().__init__(parts, *args, **kwargs)

  def _feature_types(self, k: int) -> FeatureTypes:
    types: FeatureTypes = {}
    for name, value in self._graphs[k].structured_outputs.items():
      dtype: Any = None
      if isinstance(value, tf.TensorSpec | tf.Tensor):
        is_string = value.dtype == tf.string
        dtype = bytes if is_string else value.dtype.as_numpy_dtype
      shape: Any = getattr(value, "shape", None)
      is_known = shape is not None and shape.rank is not None
      types[name] = dtype, shape.as_list() if is_known else None
    return types

  def _graph(self, part: Part, codec: "_Codec") -> Any:
    """Traces the ops of a part, from the tensors of the codec to features."""

    def example(u: Any, *tensors: Any) -> dict[str, Any]:
      features = _parsed(part.source, codec.unpack(tensors))
      return engine.public_features(part.op.fn(features, u[: part.op.draws]))

    # Autograph would wrap the errors that ops raise.
    function = tf.function(example, autograph=False)
    try:
      return function.get_concrete_function(*codec.signature)
    except ConfigError as e:
      raise ConfigError(f"{part.key}.pp: {e}") from e

  def _stream(self, steps: range, stopping: threading.Event) -> engine.Batches:
    # Read call number n has rows [start, stop) of step n // reads_per_step.
    reads_per_step = -(-self.num_rows // _ROWS_PER_READ)
    calls = tf.data.Dataset.range(
      steps.start * reads_per_step, steps.stop * reads_per_step
    )

    def rows_of(call: np.ndarray) -> order.Order:
      step, number = divmod(int(call), reads_per_step)
      start = number * _ROWS_PER_READ
      stop = min(start + _ROWS_PER_READ, self.num_rows)
      return self.row_order(step, start, stop)

    def part_of_rows(call: np.ndarray) -> np.ndarray:
      return rows_of(call).source.astype(np.int64)

    def part_of_rows_in_graph(call: Any) -> Any:
      numbers = tf.numpy_function(part_of_rows, [call], tf.int64)
      return tf.ensure_shape(numbers, [None])

    parts = [
      self._examples_of(k, calls, rows_of, stopping)
      for k in range(len(self.parts))
    ]
    dataset = parts[0]
    if len(parts) > 1:
      dataset = tf.data.Dataset.choose_from_datasets(
        parts,
        calls.map(part_of_rows_in_graph).unbatch(),
        stop_on_empty_dataset=False,
      )
    # Threads copy examples into batches; each call works on one batch ahead.
    dataset = dataset.batch(
      self.num_rows,
      drop_remainder=True,
      num_parallel_calls=max(1, self.num_threads // 8),
    )
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = self.num_threads
    options.threading.max_intra_op_parallelism = 1
    yield from dataset.with_options(options).as_numpy_iterator()

  def _examples_of(
    self,
    k: int,
    calls: Any,
    rows_of: Callable[[np.ndarray], order.Order],
    stopping: threading.Event,
  ) -> Any:
    """Returns a dataset of the examples of a part, in the order of their rows.

    Args:
      calls: dataset of the numbers of read calls.
      rows_of: returns the examples of the rows of a call, of all parts.
    """
    part, codec, graph = self.parts[k], self._codecs[k], self._graphs[k]

    def read(call: np.ndarray) -> list[np.ndarray]:
      if stopping.is_set():  # Ends the batch after the rows read before.
        raise engine.Stopped
      rows = rows_of(call)
      own = rows.source == k
      index, epoch = rows.index[own], rows.epoch[own]
      values = part.source.read(index) if index.size else {}
      return codec.pack(values, part.uniforms(index, epoch))

    specs = codec.signature

    def read_in_graph(call: Any) -> tuple[Any, ...]:
      tensors = tf.numpy_function(read, [call], [spec.dtype for spec in specs])
      shapes = [[None, *spec.shape] for spec in specs]
      return tuple(map(tf.ensure_shape, tensors, shapes))

    raw = calls.map(
      read_in_graph, num_parallel_calls=_PARALLEL_READS, deterministic=True
    )
    return raw.unbatch().map(
      lambda *tensors: graph(*tensors),
      num_parallel_calls=_CALLS_PER_THREAD * self.num_threads,
      deterministic=True,
    )

  def _run(self, k: int, raw: Batch, u: np.ndarray) -> Batch:
    features = self._graphs[k](*self._tensors(k, raw, u))
    return {name: value.numpy() for name, value in features.items()}

  def _run_op(self, op: Op, features: Any, u: np.ndarray) -> Any:
    return op.fn(features, tf.constant(u))

  def _parse(self, k: int, raw: Batch) -> Any:
    part, codec = self.parts[k], self._codecs[k]
    u = np.zeros((1, part.op.draws), np.float32)
    _, *tensors = self._tensors(k, raw, u)
    return _parsed(part.source, codec.unpack(tensors))

  def _tensors(self, k: int, raw: Batch, u: np.ndarray) -> list[Any]:
    codec = self._codecs[k]
    arrays = zip(codec.pack(raw, u), codec.signature)
    return [tf.constant(array[0], spec.dtype) for array, spec in arrays]


def _parsed(source: Any, features: dict[str, Any]) -> dict[str, Any]:
  """Parses records, for sources such as tfds that parse in the graph."""
  return source.parse(features) if hasattr(source, "parse") else features


class _Codec:
  """Passes random numbers and raw features into the graph as flat tensors.

  Features of varying shape are serialized. tf.data's unbatch (2.21) crashes on
  tensors without elements, so empty arrays are serialized too, and there is
  always at least one random number. `signature` has the TensorSpecs of one
  example: first the random numbers, then the features.
  """

  def __init__(self, spec: dict[str, tuple[Any, Any]], draws: int):
    self._spec = spec
    self._kinds = {
      name: tf.string if dtype is bytes else tf.as_dtype(dtype)
      for name, (dtype, _) in spec.items()
    }
    self.signature = [tf.TensorSpec([max(draws, 1)], tf.float32)]
    for name, (_, shape) in spec.items():
      if all(shape):
        self.signature.append(tf.TensorSpec(shape, self._kinds[name]))
      else:
        self.signature.append(tf.TensorSpec([], tf.string))

  def pack(self, raw: Batch, u: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays of a batch; `raw` may be {} if there are no rows."""
    num_rows = len(u)
    arrays = [u if u.shape[1] else np.zeros((num_rows, 1), np.float32)]
    for name, (dtype, shape) in self._spec.items():
      if not all(shape):
        serialized = [
          tf.make_tensor_proto(value, self._kinds[name]).SerializeToString()
          for value in raw.get(name, ())
        ]
        arrays.append(files.objects(serialized))
      elif num_rows:
        arrays.append(raw[name])
      else:
        kind = object if dtype is bytes else dtype
        arrays.append(np.empty((0, *shape), kind))
    return arrays

  def unpack(self, tensors: Sequence[Any]) -> dict[str, Any]:
    features = {}
    for value, (name, (_, shape)) in zip(tensors, self._spec.items()):
      if not all(shape):
        value = tf.io.parse_tensor(value, self._kinds[name])
        value = tf.ensure_shape(value, shape)
      features[name] = value
    return features
