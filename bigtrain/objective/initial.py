"""A model's variables before the first step, and how they are laid out.

`variables_fn` draws them from the seed. `sharding_rules` collects everything
that decides the layout of the variables and their optimizer state on the mesh:
axis names that the model gives in flax's way, config.sharding, and the model's
`param_dims`.
"""

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
from bigtrain.objective.task_sum import TaskSum
from bigtrain.step import keys

# Values of config.opt_sharding.
OPT_SHARDING = ("fsdp", "replica")


class InitialVariables:
  """Draws a model's variables; `boxed` may wrap arrays in flax's boxes.

  Flax puts an array whose axes have names into a box, together with the names.
  """

  def __init__(self, boxed: Callable[[Any], Variables], seed: int):
    self._boxed = boxed
    self._seed = keys.seed_word(seed)

  def boxed_spec(self) -> Variables:
    """Shapes of all variables, including the base, in their boxes."""
    return jax.eval_shape(self._boxed, self._seed)

  def __call__(self, seed: jax.Array | int | None = None) -> Variables:
    """The variables without boxes and base; the default seed is config.seed."""
    variables = self._unboxed(seed)
    return {name: x for name, x in variables.items() if name != "base"}

  def base(self) -> Variables:
    """The base, or {} of a model without adapters."""
    return self._unboxed(None).get("base", {})

  def spec(self) -> Variables:
    """Shapes of the variables without boxes and base."""
    return dict(jax.eval_shape(self))

  def _unboxed(self, seed: jax.Array | int | None) -> Variables:
    if seed is None:
      word: Any = self._seed
    elif isinstance(seed, int):
      word = keys.seed_word(seed)
    else:
      word = seed
    return dict(unboxed(self._boxed(word)))


def unboxed(variables: Any) -> Any:
  """The arrays, taken out of the boxes in which flax keeps names of axes."""
  # Under a mesh, a box's own unbox constrains its value to the names in it.
  return meta.map_axis_meta(
    lambda box: unboxed(box.value if hasattr(box, "value") else box.unbox()),
    variables,
  )


def variables_fn(
  task: Any, model: Any, batch_spec: Mapping[str, Any], seed: int
) -> InitialVariables:
  """Initial parameters and mutable collections; the model sees zeros.

  Several tasks may need different parts of the model. Flax draws a parameter
  from the seed and its name, so a part gets the same values whichever task
  needs it.
  """

  def init(seed: jax.Array) -> dict[str, Any]:
    example = Features(sharding.one_example(batch_spec), "config.input")
    if not isinstance(task, TaskSum):
      return dict(model.init(keys.init_key(seed), **task.inputs(example)))
    parts: dict[str, Any] = {}
    for inputs in task.init_inputs(example):
      variables = model.init(keys.init_key(seed), **inputs)
      # The first task that needs a variable defines it.
      parts = dict(trees.flatten_with_names(variables)) | parts
    return trees.from_flat(parts)

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
  """The rules of sharding.state_spec.

  Args:
    module, model: the model's module and the model itself.
    part: the part of the config with the model's logical_axes: config.teacher
      for a teacher, and by default the config itself.
  """
  part = part or config
  boxed = variables.boxed_spec()
  params = trees.merge(boxed["params"], boxed.get("base", {}))
  named = trees.flatten_with_names(jax.eval_shape(unboxed, params))
  param_shapes = {name: tuple(x.shape) for name, x in named}
  rules_of_boxes = _rules_of_boxes(boxed, part)
  rules = config.get("sharding", sharding.DEFAULT_RULES)
  if not isinstance(rules, list | tuple):
    raise ConfigError(
      f"config.sharding: expected a list of (regex, layout), got {rules!r}."
    )
  opt_sharding = check_choice(
    "config.opt_sharding", config.get("opt_sharding", "fsdp"), OPT_SHARDING
  )
  return sharding.Rules(
    layouts=[*rules_of_boxes, *rules],
    of_model=tensor_axes(part, module, model, param_shapes),
    split_opt=opt_sharding == "replica",
    opt_memory=sharding.read_opt_memory(config),
  )


def _rules_of_boxes(
  boxed: Variables, part: settings.Config
) -> list[tuple[str, Any]]:
  """(regex of names, layout) of each array whose axes have names."""
  # An axis of the mesh stands for itself.
  axes = (
    *logical_axes.logical_axes(part),
    *((axis, axis) for axis in sharding.AXES),
  )
  known = [name for name, _ in axes]
  rules: list[tuple[str, Any]] = []
  named = trees.flatten_with_names(nn.get_partition_spec(boxed))
  shapes = jax.tree.leaves(boxed)  # Boxes have one leaf each.
  for (name, names), shape in zip(named, shapes, strict=True):
    dims = tuple(names)
    if not dims:  # The model does not name its axes.
      continue
    for axis in dims:
      if isinstance(axis, str) and axis not in known:
        key = f"{part.path}.logical_axes"
        raise logical_axes.no_rule(key, axis, known, name)
    spec = nn.logical_to_mesh_axes(dims, axes)
    assert spec is not None  # Only for names without axes.
    # The optimizer's state of a parameter has its name at the end.
    name = re.sub("^(params|base)/", "", name)
    layout = sharding.along(spec, shape.shape, dims)
    rules.append((f"(.*/)?{re.escape(name)}", layout))
  return rules


def tensor_axes(
  config: settings.Config,
  module: Any,
  model: Any,
  shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
  """Parameters' layouts on the ambient mesh, by the roles of dimensions.

  The result is `of_model` of sharding.Rules. Without `param_dims`, a model's
  dimensions have no roles, and the axes `tensor` and `pipeline` need
  config.sharding.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  if hasattr(module, "param_dims"):
    return sharding.place(module.param_dims(model), shapes, sizes)
  mesh_axes = [axes for _, axes in logical_axes.logical_axes(config)]
  mentioned = f"{config.get('sharding', '')} {mesh_axes}"
  for axis in ("tensor", "pipeline"):
    ways = sizes.get(axis, 1)
    if ways > 1 and axis not in mentioned:
      raise ConfigError(
        f"config.mesh.{axis}={ways}: {module.__name__} has no function "
        f"param_dims(model), and config.sharding does not name the axis "
        f"{axis}; expected 1."
      )
  return {}
