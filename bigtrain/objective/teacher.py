"""A teacher: a second model that steps and evaluations use but never train.

Several are a dict by name, and so are their models and variables. The variables
are split over the devices by config.sharding, under the names
"teacher/params/...". They are no part of the train state: every start loads
them, and checkpoints leave them out. With ema=True, a teacher is the average in
the state, and has no variables here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.checkpoints import warm_start
from bigtrain.config import settings
from bigtrain.config.errors import check_number
from bigtrain.objective import building, initial


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
  part: settings.Config | None = None,
) -> Teacher:
  """Reads config.teacher; model_init=None, for tests, gives random weights."""
  part = part or config.get("teacher")
  if not part:
    return Teacher(None, {}, dict)
  if part.get("ema") is True:
    key = f"config.ema_decay, of which {part.path}.ema=True is the average"
    check_number(key, config.get("ema_decay"), least=0, below=1)
    _, model = building.model(config)
    return Teacher(model, {"teacher": {}}, lambda: {"teacher": {}})
  if "model_name" not in part:
    of = lambda x: from_config(config, task, batch_spec, mesh, seed, x)
    several = {name: of(part[name]) for name in part}
    return Teacher(
      {name: x.model for name, x in several.items()},
      {"teacher": {name: x.spec["teacher"] for name, x in several.items()}},
      lambda: {"teacher": {n: x.load()["teacher"] for n, x in several.items()}},
    )
  module, model = building.model(part)
  source = part["model_init"]
  if isinstance(source, settings.Config):
    source = part.kwargs("model_init")
  if source is not None:
    warm_start.check_published(source, module, model, path=part.path)
  for name in ("teacher", part.path.rpartition(".")[2]):
    if f"{name}_image" in batch_spec:  # Which it sees in its place.
      batch_spec = {**batch_spec, "image": batch_spec[f"{name}_image"]}
  init = initial.variables_fn(task, model, batch_spec, seed)
  rules = initial.sharding_rules(config, init, module, model, part)
  spec = sharding.state_spec({"teacher": init.spec()}, mesh, rules)
  shardings = jax.tree.map(lambda x: x.sharding, spec["teacher"])

  def load() -> dict[str, Any]:
    fresh = jax.jit(init, out_shardings=shardings)
    if source is None:
      return {"teacher": fresh()}
    key = f"{part.path}.model_init"
    variables = warm_start.load_variables(
      source, spec["teacher"], init=fresh, module=module, key=key
    )
    return {"teacher": variables}

  return Teacher(model, spec, load)
