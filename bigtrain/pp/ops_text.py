"""Text ops: lower case, clean captions, templates, choice.

They run on numpy arrays, batches of them, and tensors. Text is UTF-8, as bytes
or Python strings; results are bytes. In a tf.data graph, ops that need Python's
Unicode rules or a tokenizer's library call back into Python.
"""

import re
import string
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.ops_basic import dual
from bigtrain.pp.registry import Op

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")


class BadText(ValueError):
  """A text that an op cannot use; the message gives the reason."""


@registry.register("lower")
def lower(key: str = "text", key_result: str | None = None) -> Op:
  """Converts text, or a list of texts, to lower case by Unicode's rules."""

  def fn(text: str) -> bytes:
    return text.lower().encode()

  return on_texts(fn, "lower", key, key_result, "bytes", ())


@registry.register("canonicalize")
def canonicalize(key: str = "text", key_result: str | None = None) -> Op:
  """Converts text to lower case, without ASCII punctuation or extra spaces.

  Underscores become spaces. Contrastive models use it to make class names and
  captions look alike.
  """

  def fn(text: str) -> bytes:
    text = _PUNCTUATION.sub("", text.replace("_", " "))
    return " ".join(text.lower().split()).encode()

  return on_texts(fn, "canonicalize", key, key_result, "bytes", ())


def on_texts(
  fn: Callable[[str], Any],
  name: str,
  key: str,
  key_result: str | None,
  dtype: Literal["int32", "uint8", "bytes"],
  shape: tuple[int, ...],
) -> Op:
  """Makes an op that maps each text of a feature by `fn`, in Python.

  Args:
    fn: returns bytes, or an array of this dtype and shape, or raises BadText.
    name: name of the op, for messages.
  """
  message = f"preprocessing op {name} cannot use {key}"
  kind = object if dtype == "bytes" else dtype

  def all_of(x: Any) -> Any:
    texts = np.asarray(x, object)
    lists = [len(row) for row in texts.flat if isinstance(row, np.ndarray)]
    if len(lists) == texts.size and len({*lists}) == 1:  # A batch of lists.
      texts = np.stack([*texts.flat])
    results = np.empty((texts.size, *shape), kind)
    for i, raw in enumerate(texts.ravel()):
      results[i] = fn(_text(raw, name, key))
    # [()] turns an array without dimensions into its element.
    return results.reshape(texts.shape + shape)[()]

  def call(x: Any) -> tuple[Any, bytes]:
    # tensorflow would put the traceback of a Python error into its message.
    try:
      return all_of(x), b""
    except BadText as e:
      empty = np.zeros(np.shape(x) + shape, "S1" if kind is object else kind)
      return empty, str(e).encode()

  def apply(x: Any, u: Any) -> Any:
    if xp.on_host(x):
      try:
        return all_of(x)
      except BadText as e:
        raise DataError(f"{message}: {e}.") from e
    xp.require_kind(x, "O", name, "text")
    kinds = [tf.string if dtype == "bytes" else tf.as_dtype(dtype), tf.string]
    result, problem = tf.numpy_function(call, [x], kinds)
    result = tf.ensure_shape(result, x.shape.concatenate(shape))
    return xp.checked(result, tf.equal(problem, b""), message, problem)

  return dual(apply, key, key_result)


def _text(raw: Any, name: str, key: str) -> str:
  if not isinstance(raw, bytes | str):
    is_list = isinstance(raw, list | tuple | np.ndarray)
    shown = "lists of texts ('choice' takes one text)" if is_list else repr(raw)
    raise ConfigError(
      f"preprocessing op {name!r} expects text in {key!r}, got {shown}."
    )
  try:
    if isinstance(raw, bytes):
      return raw.decode()
    raw.encode()  # Fails for half a surrogate pair, which JSON may contain.
    return raw
  except (UnicodeDecodeError, UnicodeEncodeError) as e:
    raise BadText(f"{raw[:40]!r} is not UTF-8, at byte {e.start}") from e


def excerpt(text: str) -> str:
  """Returns the beginning of a text, for messages."""
  return repr(text if len(text) <= 40 else text[:37] + "...")


@registry.register("strfmt")
def strfmt(template: str, key_result: str = "text") -> Op:
  """Fills features into a template: strfmt("a photo of a {label_name}").

  Args:
    template: text with names of features in braces; {{ and }} are literal
      braces. Features are strings or integers, or lists that give a list.
    key_result: name of the result.
  """
  parts = _parts(template)
  names = tuple(dict.fromkeys(name for _, name in parts if name))

  def fill(*values: bytes) -> bytes:
    by_name = dict(zip(names, values))
    return b"".join(
      literal + (by_name[name] if name else b"") for literal, name in parts
    )

  def fn(features: dict[str, Any], u: Any) -> dict[str, Any]:
    values = [features[name] for name in names]
    if not names:
      text = np.full(np.shape(u)[:-1], fill(), object)[()]
    elif all(map(xp.on_host, values)):
      values = [_as_bytes(x, name) for x, name in zip(values, names)]
      rank = max(value.ndim for value in values)
      if xp.rank(u) > 1:  # Broadcasts texts [B] against lists [B, n].
        values = [v.reshape(v.shape + (rank - v.ndim) * (1,)) for v in values]
      text = np.frompyfunc(fill, len(names), 1)(*values)
    else:
      by_name = {n: _as_strings(x, n) for n, x in zip(names, values)}
      pairs = [[tf.constant(a), by_name.get(n or "", "")] for a, n in parts]
      text = tf.strings.join([piece for pair in pairs for piece in pair])
    return {**features, key_result: text}

  return Op(fn, batched=True, reads=names, origins={key_result: None})


def _parts(template: str) -> list[tuple[bytes, str | None]]:
  """Splits a template into literals, each with the name after it or None."""
  try:
    parsed = list(string.Formatter().parse(template))
  except ValueError as e:
    raise ConfigError(f"argument 'template' is {template!r}: {e}.") from e
  for _, name, spec, conversion in parsed:
    if name == "" or spec or conversion:
      raise ConfigError(
        f"argument 'template' is {template!r}: expected names of features in "
        "braces, such as {label_name}, without formats or conversions."
      )
  return [(literal.encode(), name) for literal, name, _, _ in parsed]


def _as_bytes(x: Any, name: str) -> np.ndarray:
  result = np.array(x, object)
  for at, value in np.ndenumerate(result):
    if isinstance(value, str):
      value = value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
      value = b"%d" % value
    elif not isinstance(value, bytes):
      raise _not_for_templates(name, type(value).__name__)
    result[at] = value
  return result


def _as_strings(x: Any, name: str) -> Any:
  x = tf.convert_to_tensor(x)
  if x.dtype != tf.string and not x.dtype.is_integer:
    raise _not_for_templates(name, x.dtype.name)
  return x if x.dtype == tf.string else tf.strings.as_string(x)


def _not_for_templates(name: str, dtype: str) -> ConfigError:
  op = "preprocessing op 'strfmt'"
  return ConfigError(f"{op} expects text or integers in {name!r}, got {dtype}.")


@registry.register("choice")
def choice(
  key: str = "text", key_result: str | None = None, index: int | None = None
) -> Op:
  """Chooses one item of a list, such as a caption, at random.

  Args:
    index: number of the item to choose instead, from 0, for evaluations.
  """
  if index is not None:
    check_number("argument 'index'", index, least=0, whole=True)
  message = f"preprocessing op choice has too few to choose from in {key}"

  def require_list(is_list: bool) -> None:
    if not is_list:
      raise ConfigError(
        f"preprocessing op 'choice' expects a list in {key!r}, got a single "
        "value; leave choice out."
      )

  def which(n: Any, u: Any) -> Any:
    if index is not None:
      return xp.checked(index, n > index, message, n)
    n = xp.checked(n, n > 0, message, n)
    # The largest float32 below 1, times n, rounds to less than n.
    return xp.cast(u[..., 0] * xp.cast(n, "float32"), "int32")

  def fn(values: Any, u: Any) -> Any:
    if not xp.on_host(values):
      require_list(values.shape.rank != 0)
      return tf.gather(values, which(tf.shape(values)[0], u))
    if xp.rank(u) == 1:
      require_list(np.ndim(values) > 0)
      return values[which(len(values), u)]
    chosen = [fn(*each) for each in zip(values, u)]
    if not isinstance(chosen[0], bytes | str):
      return np.stack(chosen)
    # np.asarray would convert bytes to strings of fixed length.
    result = np.empty(len(chosen), object)
    result[:] = chosen
    return result

  return dual(fn, key, key_result, draws=0 if index is not None else 1)
