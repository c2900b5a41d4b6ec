"""Reading the fields of models, which are keys of config.model.

`take_variant` and `filled` take sizes from the config or a variant.
`check_sizes` and `check_fields` name the config key in their messages.
`read_tuple` converts dicts of options to named tuples.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from flax.core import FrozenDict

from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
  nearest_divisors,
)
from bigtrain.models.layers import attention_backends, remat

# Default of fields that other fields determine, such as a size that the variant
# gives. None until construction is over.
DERIVED: Any = None

DTYPES = ("float32", "bfloat16", "float16")


def set_fields(model: Any, values: Mapping[str, Any]) -> None:
  """Sets fields in __post_init__, before Linen's own setter works."""
  for name, value in values.items():
    object.__setattr__(model, name, value)


def take_variant(model: Any, variants: Mapping[str, Mapping[str, Any]]) -> None:
  """Sets the fields that are None to the values of config.model.variant."""
  if model.variant is not None:
    check_choice("config.model.variant", model.variant, variants)
    sizes = {}
    for name, size in variants[model.variant].items():
      given = getattr(model, name)
      sizes[name] = given or size
    set_fields(model, sizes)


def pick(cls: Any, fields: Any, **others: Any) -> Any:
  """A named tuple of options: `others`, and a model's fields of these names."""
  values = {
    name: getattr(fields, name)
    for name in cls._fields
    if name not in others and hasattr(fields, name)
  }
  return cls(**values, **others)


def subclass(cls: type, members: Mapping[str, Any]) -> type:
  """A subclass with some members replaced that looks like its class."""
  names = ("__module__", "__qualname__", "__doc__")
  own = {name: getattr(cls, name) for name in names}
  return type(cls.__name__, (cls,), {**own, **members})


def check_sizes(model: Any, names: Iterable[str]) -> None:
  for name in names:
    value = getattr(model, name)
    check_number(f"config.model.{name}", value, least=1, whole=True)


def check_fields(model: Any, *rates: str, **choices: Iterable[Any]) -> None:
  """Checks fields: rates, choices, and those that most models have."""
  choices |= dict(attention=attention_backends.NAMES, dtype=DTYPES)
  remat.read(getattr(model, "remat_policy", "none"))
  for name, values in choices.items():
    if hasattr(model, name):
      key = f"config.model.{name}"
      check_choice(key, getattr(model, name), values)
  for name in rates:
    key = f"config.model.{name}"
    check_number(key, getattr(model, name), least=0, below=1)


def filled(
  model: Any,
  variants: Mapping[str, Mapping[str, Any]],
  names: Iterable[str],
  *,
  default: str,
  example: str,
) -> dict[str, Any]:
  """Values of a language model's fields.

  A field's value comes from the config, else from the variant, else from other
  fields. Options of experts that do not say how many change some of the
  variant's, and so do kinds of layers if some of the variant's are left out.
  """
  variant = model.variant or default
  check_choice("config.model.variant", variant, variants)
  given = {name: getattr(model, name) for name in names}
  given = {name: value for name, value in given.items() if value is not None}
  of_variant = variants[variant]
  moe = given.get("moe")
  if isinstance(moe, Mapping) and "num_experts" not in moe:
    given["moe"] = {**(of_variant.get("moe") or {}), **moe}
  if "kinds" in given and not {"layers", "first_layers"} & given.keys():
    given["kinds"] = _changed_kinds(of_variant.get("kinds"), given["kinds"])
  values = {**of_variant, **given}
  for name in ("vocab_size", "width", "depth", "num_heads"):
    if name not in values:
      raise ConfigError(
        f"config.model.{name}: missing; give it, or a variant such as "
        f"{example!r}."
      )
  width, heads = values["width"], values["num_heads"]
  if "head_dim" not in values:
    if width % heads:
      raise ConfigError(
        f"config.model.num_heads: {heads} does not divide the width {width}; "
        f"the nearest that do: {nearest_divisors(heads, width)}."
      )
    values["head_dim"] = width // heads
  return {"mlp_dim": 4 * width, **values}


def _changed_kinds(of_variant: Any, given: Any) -> Any:
  """A variant's kinds, of which a config changes some."""
  if not of_variant or not isinstance(given, Mapping):
    return given
  if {*of_variant} <= {*given}:  # All are given, and replace the variant's.
    return given
  for name in given:
    key = f"config.model.kinds.{name}"
    check_choice(key, name, of_variant, "no kind of the variant:")
  return _merged(of_variant, given)


def changed(cls: Any, of_variant: Any, given: Any) -> Any:
  """Options of a class, which change a variant's unless they are complete."""
  required = {*cls._fields} - {*cls._field_defaults}
  if isinstance(given, Mapping) and not required <= {*given}:
    return _merged(of_variant, given)
  return given


def _merged(old: Any, new: Any) -> Any:
  """A dict with the changes of another one, at any depth."""
  if not isinstance(old, Mapping) or not isinstance(new, Mapping):
    return new
  return {**old, **{name: _merged(old.get(name), new[name]) for name in new}}


def read_tuple(
  cls: Any, given: Any, key: str, **limits: Mapping[str, Any]
) -> Any:
  """Reads a dict of options as a named tuple; keeps named tuples and None.

  `limits` are the arguments of check_number, by option. An option whose default
  is None may be None.
  """
  if given is None or isinstance(given, cls):
    return given
  if not isinstance(given, Mapping):
    raise ConfigError(
      f"{key}: expected dict({', '.join(cls._fields)}) or None, got {given!r}."
    )
  check_kwargs(cls, given, key)
  result = cls(**given)
  defaults = cls._field_defaults
  for name, limit in limits.items():
    value = getattr(result, name)
    may_be_none = name in defaults and defaults[name] is None
    if value is not None or not may_be_none:
      check_number(f"{key}.{name}", value, **limit)
  return result


def read_names(
  key: str, given: Any, choices: Collection[str]
) -> tuple[str, ...]:
  """Checks a list of names, such as ("qkv", "out")."""
  if isinstance(given, str) or not isinstance(given, Collection):
    raise ConfigError(f"{key}: expected a list of names, got {given!r}.")
  for name in given:
    check_choice(key, name, choices)
  return tuple(given)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
  """Makes errors name a part of a model, in place of config.model."""
  try:
    yield
  except ConfigError as e:
    if key in str(e):
      raise
    raise ConfigError(str(e).replace("config.model", key)) from e


def hashable(value: Any) -> Any:
  """Returns dicts and lists as FrozenDicts and tuples, recursively."""
  if isinstance(value, Mapping):
    return FrozenDict({name: hashable(x) for name, x in value.items()})
  if isinstance(value, list):
    return tuple(hashable(x) for x in value)
  return value
