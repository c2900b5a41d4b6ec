"""Ops on labels: from names to numbers, from numbers to vectors.

They run on numpy arrays, on batches of them, and on tensors alike; see
`ops_basic`.
"""

import collections
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.pp import arrays, registry
from bigtrain.pp.ops_basic import dual
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError, DataError


@registry.register("onehot")
def onehot(
  depth: int,
  key: str = "labels",
  key_result: str | None = None,
  multi: bool = True,
  on: float = 1,
  off: float = 0,
) -> Op:
  """Integer labels as float32 vectors [depth].

  A negative label stands for none: a vector that is `off` throughout, and in a
  list of labels one that does not count. One of `depth` or more is an error.

  Args:
    depth: length of the vectors: the number of classes.
    key: the feature: one label, or a vector of them [n].
    key_result: where the result goes, if not back to `key`.
    multi: whether several labels are merged into one vector [depth]; otherwise
      the result is [n, depth].
    on: value for the classes that are named.
    off: value for the others.
  """
  if depth < 1:
    raise ConfigError(f"argument 'depth' is {depth}, expected at least 1.")
  classes = np.arange(depth, dtype=np.int64)
  on32, off32 = np.float32(on), np.float32(off)

  def fn(labels, u):
    arrays.require_kind(
      labels, "iu", f"onehot({depth})", "integer labels ('lookup' maps names)"
    )
    labels = arrays.cast(labels, "int64")
    labels = arrays.checked(
      labels,
      arrays.reduce_all(labels < depth),
      f"preprocessing op onehot({depth}) got a label that is not below "
      f"{depth} in {key}",
      labels,
    )
    is_class = labels[..., None] == classes
    if multi and arrays.rank(labels) == arrays.rank(u):
      is_class = arrays.reduce_any(is_class, axis=-2)
    return arrays.where(is_class, on32, off32)

  return dual(fn, key, key_result)


@registry.register("lookup")
def lookup(
  mapping: str | dict | list | tuple,
  sep: str | None = None,
  key: str = "label",
  key_result: str | None = None,
) -> Op:
  """Names, or integers, as the int64 ids that a table gives them.

  Args:
    mapping: a dict from name to id; or a list of names, whose ids count from
      0; or a text file (UTF-8) with a name in each line, likewise.
    sep: in a file, what separates the name from its id in each line.
    key: the feature: bytes, a string or an integer, or an array of them.
    key_result: where the result goes, if not back to `key`.

  Raises:
    ConfigError: no such file, or a table that is no table. A value that the
      table lacks is an error that names it, when it is met.
  """
  table = _table(mapping, sep)
  source = mapping if isinstance(mapping, str) else "the mapping"
  message = f"preprocessing op lookup finds no id in {source} for {key}"
  on_tensors = _on_tensors(table, message)

  def one(name):
    name = name.encode() if isinstance(name, str) else name
    try:
      return table[name]
    except KeyError:
      raise DataError(f"{message}: {name!r}.") from None

  def fn(x, u):
    if not arrays.on_host(x):
      return on_tensors(x)
    # item and tolist give Python's own objects, which the table is keyed by.
    if isinstance(x, bytes | str | int):
      return np.int64(one(x))
    names = np.asarray(x)
    ids = [one(name) for name in names.ravel().tolist()]
    return np.array(ids, np.int64).reshape(names.shape)[()]

  op = dual(fn, key, key_result)
  if not isinstance(mapping, str):
    return op
  content = hashlib.sha256(repr(table).encode()).hexdigest()[:16]
  return op._replace(fingerprints={mapping: content})


def _table(mapping: Any, sep: str | None) -> dict[Any, int]:
  """The mapping as a dict from bytes or int to id."""
  if isinstance(mapping, str):
    pairs = _read(mapping, sep)
  elif sep is not None:
    raise ConfigError("argument 'sep' needs a file as mapping.")
  elif isinstance(mapping, dict):
    pairs = list(mapping.items())
  else:
    pairs = [(name, i) for i, name in enumerate(mapping)]
  if not pairs:
    raise ConfigError("argument 'mapping' is empty.")
  if {type(name) for name, _ in pairs} not in ({str}, {int}):
    raise ConfigError("expected names that are all strings or all integers.")
  for name, value in pairs:
    if isinstance(value, bool) or not isinstance(value, int):
      raise ConfigError(
        f"the id of {name!r} is {value!r}, expected an integer."
      )
  _refuse_twice([name for name, _ in pairs])
  return {n.encode() if isinstance(n, str) else n: v for n, v in pairs}


def _read(path: str, sep: str | None) -> list[tuple[str, int]]:
  if not os.path.isfile(path):
    raise ConfigError(f"argument 'mapping': no such file: {path!r}.")
  try:
    with open(path, encoding="utf-8") as f:
      lines = f.read().splitlines()
  except (OSError, UnicodeDecodeError) as e:
    raise ConfigError(f"argument 'mapping': cannot read {path!r}: {e}.") from e
  if sep is None:
    return [(line, i) for i, line in enumerate(lines)]
  pairs = []
  for number, line in enumerate(lines, 1):
    name, found, value = line.rpartition(sep)
    try:
      pairs.append((name, int(value)))
    except ValueError:
      found = ""
    if not found:
      raise ConfigError(
        f"{path}:{number}: expected name{sep!r}id, got {line!r}."
      )
  return pairs


def _refuse_twice(names: Sequence[Any]) -> None:
  name, count = collections.Counter(names).most_common(1)[0]
  if count > 1:
    raise ConfigError(f"argument 'mapping' has {name!r} {count} times.")


def _on_tensors(table: dict[Any, int], message: str) -> Any:
  """The lookup as a function of tensors, with a table built once."""
  built: list[Any] = []

  def look_up(x):
    import tensorflow as tf

    dtype = tf.string if isinstance(next(iter(table)), bytes) else tf.int64
    if (x.dtype == tf.string) != (dtype == tf.string):
      raise ConfigError(
        f"preprocessing op 'lookup' maps {dtype.name}, but the feature is "
        f"{x.dtype.name}."
      )
    if not built:
      # Outside of the graph that is being traced: a table is a resource, and
      # a graph that is run many times must not build it many times.
      with tf.init_scope():
        names = tf.constant(list(table), dtype)
        ids = tf.constant(list(table.values()), tf.int64)
        initializer = tf.lookup.KeyValueTensorInitializer(names, ids)
        # Any number that is no id will do to tell what is missing.
        built.append(tf.lookup.StaticHashTable(initializer, _absent(table)))
    ids = built[0].lookup(tf.cast(x, dtype) if dtype == tf.int64 else x)
    found = tf.reduce_all(ids != _absent(table))
    return arrays.checked(ids, found, message, x)

  return look_up


def _absent(table: dict[Any, int]) -> int:
  return min(table.values()) - 1


@registry.register("first_rows")
def first_rows(
  number: int, key: str = "labels", key_result: str | None = None
) -> Op:
  """The first rows of a list, and rows of zeros where there are fewer.

  So that lists of different lengths, such as the captions of an image once
  they are ids, have one shape.

  Args:
    number: of rows.
    key: the feature [n, ...], of numbers.
    key_result: where the result goes, if not back to `key`.
  """
  if number < 1:
    raise ConfigError(f"argument 'number' is {number}, expected at least 1.")

  def fn(x, u):
    arrays.require_kind(x, "biuf", "first_rows", "a list of numbers")
    if arrays.rank(x) == 0:
      raise ConfigError(
        f"preprocessing op 'first_rows' expects a list in {key!r}, got a "
        "single value."
      )
    x = x[:number]
    edges = [[0, 0]] * (arrays.rank(x) - 1)
    if arrays.on_host(x):
      return np.pad(x, [[0, number - len(x)], *edges])
    import tensorflow as tf

    padded = tf.pad(x, [[0, number - tf.shape(x)[0]], *edges])
    return tf.ensure_shape(padded, [number, *x.shape[1:]])

  return registry.on_feature(fn, key, key_result)
