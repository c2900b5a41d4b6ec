"""Label ops: from names to ids, and from ids to vectors."""

import collections
import hashlib
import os
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.files import paths
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.ops_basic import dual
from bigtrain.pp.registry import Op


@registry.register("onehot")
def onehot(
  depth: int,
  key: str = "labels",
  key_result: str | None = None,
  multi: bool = True,
  on: float = 1,
  off: float = 0,
) -> Op:
  """Converts integer labels to float32 vectors [depth].

  A negative label means no label: its vector is `off` everywhere, and in a list
  of labels it is ignored. A label of `depth` or more is an error.

  Args:
    depth: number of classes, the length of the vectors.
    multi: whether a list of n labels gives one vector [depth]; if False, it
      gives [n, depth].
    on, off: value of an example's classes, and of all others.
  """
  check_number("argument 'depth'", depth, least=1, whole=True)
  message = (
    f"preprocessing op onehot({depth}) got a label that is not below {depth} "
    f"in {key}"
  )
  classes = np.arange(depth, dtype=np.int64)
  on32, off32 = np.float32(on), np.float32(off)

  def fn(labels, u):
    xp.require_kind(
      labels, "iu", f"onehot({depth})", "integer labels ('lookup' maps names)"
    )
    labels = xp.cast(labels, "int64")
    labels = xp.checked(labels, xp.reduce_all(labels < depth), message, labels)
    is_class = labels[..., None] == classes
    if multi and xp.rank(labels) == xp.rank(u):
      is_class = xp.reduce_any(is_class, axis=-2)
    return xp.library(is_class).where(is_class, on32, off32)

  return dual(fn, key, key_result)


@registry.register("lookup")
def lookup(
  mapping: str | dict | list | tuple,
  sep: str | None = None,
  key: str = "label",
  key_result: str | None = None,
) -> Op:
  """Maps names, or integers, to int64 ids.

  Args:
    mapping: a dict from name to id; or a list of names, with ids from 0; or the
      path of a UTF-8 text file with one name per line, with ids from 0.
    sep: separator of name and id, for files with "name<sep>id" on each line.
  """
  table = _table(mapping, sep)
  source = mapping if isinstance(mapping, str) else "the mapping"
  message = f"preprocessing op lookup finds no id in {source} for {key}"
  on_tensors = _on_tensors(table, message)

  def look_up(name):
    name = name.encode() if isinstance(name, str) else name
    try:
      return table[name]
    except KeyError:
      raise DataError(f"{message}: {name!r}.") from None

  def fn(x, u):
    if not xp.on_host(x):
      return on_tensors(x)
    if isinstance(x, bytes | str | int):
      return np.int64(look_up(x))
    names = np.asarray(x)
    # tolist gives Python objects, which are the keys of the table.
    ids = [look_up(name) for name in names.ravel().tolist()]
    return np.array(ids, np.int64).reshape(names.shape)[()]

  op = dual(fn, key, key_result)
  if names := _names(table):
    op = op._replace(class_names={key_result or key: names})
  if not isinstance(mapping, str):
    return op
  content = hashlib.sha256(repr(table).encode()).hexdigest()[:16]
  return op._replace(fingerprints={mapping: content})


def _table(mapping: Any, sep: str | None) -> dict[Any, int]:
  """Returns {name as bytes, or integer: id}."""
  if isinstance(mapping, str):
    pairs = _read(mapping, sep)
  elif sep is not None:
    raise ConfigError("argument 'sep' needs a file as 'mapping'.")
  elif isinstance(mapping, dict):
    pairs = list(mapping.items())
  else:
    pairs = [(name, i) for i, name in enumerate(mapping)]
  if not pairs:
    raise ConfigError("argument 'mapping' is empty.")
  if {type(name) for name, _ in pairs} not in ({str}, {int}):
    raise ConfigError(
      "argument 'mapping': expected names that are all strings or all integers."
    )
  for name, value in pairs:
    if isinstance(value, bool) or not isinstance(value, int):
      raise ConfigError(
        f"the id of {name!r} is {value!r}, expected an integer."
      )
  name, count = collections.Counter(n for n, _ in pairs).most_common(1)[0]
  if count > 1:
    raise ConfigError(f"argument 'mapping' has {name!r} {count} times.")
  return {n.encode() if isinstance(n, str) else n: v for n, v in pairs}


def _names(table: dict[Any, int]) -> list[str]:
  """Returns the first name of each id from 0; an id without one is a number."""
  names: dict[int, str] = {}
  for name, number in table.items():
    text = name.decode() if isinstance(name, bytes) else str(name)
    names.setdefault(number, text)
  if max(names) > 10 * len(table):
    return []  # These numbers do not count classes.
  return [names.get(i, str(i)) for i in range(max(names) + 1)]


def _read(path: str, sep: str | None) -> list[tuple[str, int]]:
  """Returns (name, id) of each line of a file."""
  path = paths.absolute(path)
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
    name, separator, value = line.rpartition(sep)
    try:
      pairs.append((name, int(value if separator else "")))
    except ValueError as e:
      raise ConfigError(
        f"{path}:{number}: expected name{sep!r}id, got {line!r}."
      ) from e
  return pairs


def _on_tensors(table: dict[Any, int], message: str) -> Any:
  """Returns the lookup for tensors; the first call builds its table."""
  tables: list[Any] = []
  absent = min(table.values()) - 1  # Marks unknown names.

  def look_up(x):
    dtype = tf.string if isinstance(next(iter(table)), bytes) else tf.int64
    if (x.dtype == tf.string) != (dtype == tf.string):
      raise ConfigError(
        f"preprocessing op 'lookup' maps {dtype.name}, but the feature is "
        f"{x.dtype.name}."
      )
    if not tables:
      # A table is a resource. It is built outside the graph that is being
      # traced, so that running the graph again does not build it again.
      with tf.init_scope():
        names = tf.constant(list(table), dtype)
        ids = tf.constant(list(table.values()), tf.int64)
        initializer = tf.lookup.KeyValueTensorInitializer(names, ids)
        tables.append(tf.lookup.StaticHashTable(initializer, absent))
    ids = tables[0].lookup(tf.cast(x, dtype) if dtype == tf.int64 else x)
    return xp.checked(ids, tf.reduce_all(ids != absent), message, x)

  return look_up


@registry.register("first_rows")
def first_rows(
  number: int, key: str = "labels", key_result: str | None = None
) -> Op:
  """Cuts or zero-pads a list, such as the tokens of an image's captions.

  Args:
    number: length of the result.
  """
  check_number("argument 'number'", number, least=1, whole=True)

  def fn(x, u):
    xp.require_kind(x, "biuf", "first_rows", "a list of numbers")
    if xp.rank(x) == 0:
      raise ConfigError(
        f"preprocessing op 'first_rows' expects a list in {key!r}, got a "
        "single value."
      )
    x = x[:number]
    edges = [[0, 0]] * (xp.rank(x) - 1)
    if xp.on_host(x):
      return np.pad(x, [[0, number - len(x)], *edges])
    padded = tf.pad(x, [[0, number - tf.shape(x)[0]], *edges])
    return tf.ensure_shape(padded, [number, *x.shape[1:]])

  return registry.on_feature(fn, key, key_result)
