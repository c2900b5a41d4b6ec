"""A model's variables before the first step, and the layout that it wants."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import Variables
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.inputs.named_features import Features
from bigtrain.objective import logical_axes
from bigtrain.step import keys

# Values of config.opt_sharding.
OPT_SHARDING = ("fsdp", "replica")


class InitialVariables:
  """Initial variables of a model, which may name axes in flax's boxes."""

  def __init__(self, boxed: Callable[[Any], Variables], seed: int):
    self._boxed = boxed
    self._seed = keys.seed_word(seed)

  def boxed_spec(self) -> Variables:
    return jax.eval_shape(self._boxed, self._seed)

  def __call__(self, seed: jax.Array | int | None = None) -> Variables:
    """The variables without boxes and base; config.seed is the default."""
    variables = self._unboxed(seed)
    return {name: x for name, x in variables.items() if name != "base"}

  def base(self) -> Variables:
    """The base, or {} of a model without adapters."""
    return self._unboxed(None).get("base", {})

  def _unboxed(self, seed: jax.Array | int | None) -> Variables:
    word = keys.seed_word(seed) if isinstance(seed, int) else seed
    return dict(unboxed(self._boxed(self._seed if word is None else word)))

  def spec(self) -> Variables:
    return dict(jax.eval_shape(self))


def unboxed(variables: Any) -> Any:
  # Under a mesh, a box's own unbox constrains its value to the names in it.
  return meta.map_axis_meta(
    lambda box: unboxed(box.value if hasattr(box, "value") else box.unbox()),
    variables,
  )


def variables_fn(
  task: Any, model: Any, batch_spec: Mapping[str, Any], seed: int
) -> InitialVariables:
  """Initial parameters and mutable collections; the model sees zeros."""

  def init(seed: jax.Array) -> dict[str, Any]:
    example = Features(sharding.one_example(batch_spec), "config.input")
    return dict(model.init(keys.init_key(seed), **task.inputs(example)))

  @jax.jit
  def init_variables(seed: jax.Array) -> dict[str, Any]:
    with logical_axes.no_logical_axes():
      try:
        return init(seed)
      except ValueError:
        # The names of nn.with_partitioning need not be axes of the mesh, and
        # flax applies them to it.
        no_mesh = jax.sharding.AbstractMesh((), ())
        with jax.sharding.use_abstract_mesh(no_mesh):
          return init(seed)

  return InitialVariables(init_variables, seed)


def sharding_rules(
  config: settings.Config,
  variables: InitialVariables,
  module: Any,
  model: Any,
  part: settings.Config | None = None,
) -> sharding.Rules:
  """The rules of sharding.state_spec; the axes of a teacher are in `part`."""
  part = part or config
  # An axis of the mesh stands for itself.
  axes = (
    *logical_axes.logical_axes(part),
    *((axis, axis) for axis in sharding.AXES),
  )
  known = [name for name, _ in axes]
  boxed = variables.boxed_spec()
  shapes = jax.tree.leaves(boxed)  # Boxes have one leaf each.
  rules: list[tuple[str, Any]] = []
  named = trees.flatten_with_names(nn.get_partition_spec(boxed))
  for (name, names), shape in zip(named, shapes, strict=True):
    dims = tuple(names)
    if not dims:  # The model does not name its axes.
      continue
    for axis in dims:
      if isinstance(axis, str) and axis not in known:
        raise logical_axes.no_rule(
          f"{part.path}.logical_axes", axis, known, name
        )
    spec = nn.logical_to_mesh_axes(dims, axes)
    assert spec is not None  # Only for names without axes.
    layout = sharding.along(spec, shape.shape, dims)
    # The optimizer's state of a parameter has its name at the end.
    pattern = f"(.*/)?{re.escape(re.sub('^(params|base)/', '', name))}"
    rules.append((pattern, layout))
  given = config.get("sharding", sharding.DEFAULT_RULES)
  if not isinstance(given, list | tuple):
    raise ConfigError(
      f"config.sharding: expected a list of (regex, layout), got {given!r}."
    )
  params = trees.merge(boxed["params"], boxed.get("base", {}))
  named = trees.flatten_with_names(jax.eval_shape(unboxed, params))
  param_shapes = {name: tuple(x.shape) for name, x in named}
  opt_sharding = check_choice(
    "config.opt_sharding", config.get("opt_sharding", "fsdp"), OPT_SHARDING
  )
  return sharding.Rules(
    layouts=[*rules, *given],
    of_model=tensor_axes(part, module, model, param_shapes),
    split_opt=opt_sharding == "replica",
    opt_memory=sharding.read_opt_memory(config),
  )


def tensor_axes(
  config: settings.Config,
  module: Any,
  model: Any,
  shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
  """`of_model` of sharding.Rules, for the ambient mesh."""
  sizes = jax.sharding.get_abstract_mesh().shape
  if not hasattr(module, "param_dims"):
    of_axes = [axes for _, axes in logical_axes.logical_axes(config)]
    named = f"{config.get('sharding', '')} {of_axes}"
    for axis in ("tensor", "pipeline"):
      if (ways := sizes.get(axis, 1)) > 1 and axis not in named:
        raise ConfigError(
          f"config.mesh.{axis}={ways}: {module.__name__} has no function "
          f"param_dims(model), and config.sharding does not name the axis "
          f"{axis}; expected 1."
        )
    return {}
  return sharding.place(module.param_dims(model), shapes, sizes)
