"""Rules of the axis `tensor` for the layers of this package.

Attention is split by heads, MLPs and experts by hidden units. Experts with an
axis of their own are split by their number over it.
"""

from typing import Any

from bigtrain.sharding import TensorRule

# With fewer heads of keys and values than devices, these are not split; see
# sharding.columns.
LAYERS = [
  TensorRule(r"(.*/)?query/(kernel|bias)", -2),
  TensorRule(r"(.*/)?(key|value)/(kernel|bias)", -2, needed=False),
  TensorRule(r"(.*/)?out/kernel", -3),
  TensorRule(r"(.*/)?(up|gate|Dense_0)/(kernel|bias)", -1),
  TensorRule(r"(.*/)?(down|Dense_1)/kernel", -2),
]


def experts(options: Any) -> list[TensorRule]:
  """Returns the rules of whole experts, which come before `LAYERS`.

  Args:
    options: moe.Options, or None for no experts.
  """
  if options is None or options.axis is None:
    return []
  kernels = r"(.*/)?moe/(up|gate|down)/kernel"
  return [TensorRule(kernels, -3, axis=options.axis)]


def table(name: str) -> TensorRule:
  """Returns the rule of an embedding table (V, D), split by its rows."""
  return TensorRule(name, -2, needed=False)


def head(name: str) -> list[TensorRule]:
  """Returns the rules of an output layer, split by its classes."""
  return [TensorRule(f"{name}/(kernel|bias)", -1, needed=False)]


def under(prefix: str, rules: list[TensorRule]) -> list[TensorRule]:
  """Returns the rules for parameters whose names start with a prefix."""
  return [
    rule._replace(pattern=f"{prefix}(?:{rule.pattern})") for rule in rules
  ]
