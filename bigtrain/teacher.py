"""A teacher: a second model that steps and evaluations use but never train.

Its variables are split over the devices by config.sharding, under the names
"teacher/params/...". They are no part of the train state: every start loads
them, and checkpoints leave them out.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bigtrain import parts, settings, sharding
from bigtrain.checkpoints import warm_start
from bigtrain.step import initial


class Teacher(NamedTuple):
  """The teacher of a run; without one, `model` is None and `spec` is empty."""

  model: Any
  spec: Mapping[str, Any]  # Shapes of {"teacher": its variables}.
  load: Callable[[], Mapping[str, Any]]


def from_config(
  config: settings.Config,
  task: Any,
  batch_spec: Mapping[str, Any],
  mesh: Mesh,
  seed: int,
) -> Teacher:
  """Reads config.teacher; model_init=None, for tests, gives random weights."""
  if not config.get("teacher"):
    return Teacher(None, {}, dict)
  module, model = parts.model(config.teacher)
  source = config.teacher["model_init"]
  if isinstance(source, settings.Config):
    source = config.teacher.kwargs("model_init")
  if source is not None:
    warm_start.check_published(source, module, model, path=config.teacher.path)
  init = initial.variables_fn(task, model, batch_spec, seed)
  rules = initial.sharding_rules(config, init, module, model, config.teacher)
  spec = sharding.state_spec({"teacher": init.spec()}, mesh, rules)
  shardings = jax.tree.map(lambda x: x.sharding, spec["teacher"])

  def load() -> dict[str, Any]:
    fresh = jax.jit(init, out_shardings=shardings)
    if source is None:
      return {"teacher": fresh()}
    key = f"{config.teacher.path}.model_init"
    variables = warm_start.load_variables(
      source, spec["teacher"], init=fresh, module=module, key=key
    )
    return {"teacher": variables}

  return Teacher(model, spec, load)
