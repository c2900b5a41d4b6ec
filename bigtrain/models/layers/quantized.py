"""Products of dense layers in int8 or fp8 while a model trains.

  config.quantize = [(".*/mlp/.*", "fp8"), (".*", "int8")]

Regular expressions match the whole name of a module without the numbers of
blocks, such as "blocks/attention/query". The first match decides. None in place
of a dtype keeps a layer's precision. Dense layers called head, pre_logits,
router or shared_gate only match a regular expression that contains their name.
Products outside dense layers are never quantized.

Parameters, their gradients and the results of products keep their dtype. Scales
are the largest absolute values: one for each token of the activations and of
their gradients, and one for each output of a kernel. Each product x W has three
steps:

  forward               x and W in int8, or in fp8 with 4 bits of exponent
  gradient of x         the same W; the gradient in int8, or in fp8 with 5 bits
  gradient of W         the quantized x, and the gradient as it is

The gradient in the last step is not quantized, as in AQT (Abdolrashidi et al.
2021, github.com/google/aqt, config_v4): scales over tokens would depend on the
number of microbatches. Qwix (github.com/google/qwix) does the arithmetic.
"""

import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from bigtrain.config import errors
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  did_you_mean,
  import_package,
)
from bigtrain.models.layers.options import subclass

# Dtypes of the operands of a product, and of the gradients of its result.
_DTYPES = {
  "int8": (jnp.int8, jnp.int8),
  "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2),
}
# The largest value becomes 127. In Qwix it is 127.5, which the last bit of the
# scale rounds to 127 or to 128, so that results would depend on the mesh.
_CALIBRATION = {"int8": f"absmax,{127.5 / 127}", "fp8": "absmax"}
# Names of layers that a regular expression has to contain.
_LEFT_OUT = ("head", "pre_logits", "router", "shared_gate")


def model(cls: type[nn.Module], rules: Any, key: str) -> type[nn.Module]:
  """Returns a subclass whose dense layers are quantized in `apply`."""
  layers = _Layers(rules, key)

  @functools.wraps(cls.apply)
  def apply(*args: Any, **kwargs: Any) -> Any:
    with nn.intercept_methods(layers.intercept):
      return cls.apply(*args, **kwargs)

  members = dict(apply=nn.nowrap(apply), quantized_layers=layers)
  return subclass(cls, members)


def check(model: nn.Module) -> None:
  """Call after tracing: raises an error if a rule is not used."""
  layers = getattr(model, "quantized_layers", None)
  if layers is not None:
    layers.check()


class _Layers:
  def __init__(self, rules: Any, key: str):
    self._key = key
    self._rules = _read(rules, key)
    self._products = {name: _product(name, key) for name in _DTYPES}
    self._lock = threading.Lock()  # Evaluations are traced in a thread.
    self._names: dict[str, int | None] = {}  # Layer -> number of its rule.

  def intercept(
    self,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
  ) -> Any:
    layer = context.module
    is_dense = isinstance(layer, nn.Dense | nn.DenseGeneral)
    if not is_dense or not layer.path:  # A copy, by lora.py, has its product.
      return call(*args, **kwargs)
    name = _name(layer.path)
    number = self._rule(name)
    with self._lock:
      self._names[name] = number
    precision = None if number is None else self._rules[number][1]
    if precision is None:
      return call(*args, **kwargs)
    # Modules are frozen, but this instance exists for the present call only.
    given = layer.dot_general
    object.__setattr__(layer, "dot_general", self._products[precision])
    try:
      return call(*args, **kwargs)
    finally:
      object.__setattr__(layer, "dot_general", given)

  def _rule(self, name: str) -> int | None:
    last = name.rpartition("/")[2]
    for number, (pattern, _) in enumerate(self._rules):
      named = last not in _LEFT_OUT or last in pattern.pattern
      if named and pattern.fullmatch(name):
        return number
    return None

  def check(self) -> None:
    with self._lock:
      names = dict(self._names)
    if not names:
      raise ConfigError(f"{self._key}: this model has no dense layers.")
    for number, (pattern, _) in enumerate(self._rules):
      if number not in names.values():
        hint = did_you_mean(pattern.pattern, names)
        raise ConfigError(
          f"{self._key}[{number}]: {pattern.pattern!r} is not the first match "
          f"of any dense layer.{hint}"
        )


def _read(rules: Any, key: str) -> list[tuple[re.Pattern[str], str | None]]:
  if not isinstance(rules, list | tuple):
    raise ConfigError(f"{key}: expected a list of pairs, got {rules!r}.")
  result = []
  for i, rule in enumerate(rules):
    if not isinstance(rule, list | tuple) or len(rule) != 2:
      raise ConfigError(
        f"{key}[{i}]: expected (regex, 'int8' | 'fp8' | None), got {rule!r}."
      )
    regex, precision = rule
    if precision is not None:
      check_choice(f"{key}[{i}]", precision, _DTYPES, "unknown precision")
    result.append((errors.regex(f"{key}[{i}]", regex), precision))
  return result


def _product(precision: str, key: str) -> Callable[..., Any]:
  qwix = import_package("qwix", key, "'bigtrain[quantize]'")
  dtype, gradient = _DTYPES[precision]
  method = _CALIBRATION[precision]
  rule = qwix.QtRule(
    weight_qtype=dtype,
    act_qtype=dtype,
    bwd_qtype=gradient,
    weight_calibration_method=method,
    act_calibration_method=method,
    bwd_calibration_method=method,
    additional_qt_config={"drhs_grad_qtype": None},
  )
  return qwix.QtProvider([rule]).dot_general


def _name(path: Sequence[str]) -> str:
  """The name of a layer, without the numbers of blocks.

  >>> _name(("Transformer", "encoderblock_3", "MlpBlock_0", "Dense_1"))
  'Transformer/encoderblock/MlpBlock/Dense_1'
  >>> _name(("blocks", "0", "mlp", "up"))
  'blocks/mlp/up'
  """
  parts = [re.sub(r"(?i)^(.*blocks?)_?\d+$", r"\1", part) for part in path]
  return "/".join(part for part in parts if not part.isdecimal())
