"""A teacher: a second model that steps and evaluations use but never train.

config.teacher names it as a config names its model: with model_name, model and
model_init. Several teachers are a dict by name, and so are their models and
variables. With ema=True, the teacher is the average of the student in the train
state, and has no separate variables.

config.sharding splits the variables over the devices, under the names
"teacher/params/...". They are not part of the train state: every start loads
them, and checkpoints leave them out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.checkpoints import warm_start
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.objective import building, initial, task_functions
from bigtrain.objective.task_sum import Entry


class Teacher(NamedTuple):
  """The teacher of a run; without one, `model` is None and `spec` is empty."""

  model: Any
  spec: Mapping[str, Any]  # Shapes of {"teacher": its variables}.
  load: Callable[[], Mapping[str, Any]]


def of_tasks(
  config: settings.Config,
  entries: Sequence[Entry],
  batch_spec: Mapping[str, Any],
  mesh: Mesh,
  seed: int,
) -> tuple[Teacher, Sequence[Entry]]:
  """The teacher of a run, and the tasks that it teaches."""
  taught = entries
  if len(entries) > 1:
    model = _stand_in(config)
    taught = [
      x
      for x in entries
      if task_functions.uses_teacher(x.module, model) or x.part.get("select")
    ]
    if model is not None and not taught:
      raise ConfigError("config.teacher: no task of config.task uses it.")
  first = (taught or entries)[0]
  spec = first.view(batch_spec)
  return from_config(config, first.module, spec, mesh, seed), taught


def _stand_in(config: settings.Config) -> Any:
  """Stands for the models of config.teacher: a dict if there are several."""
  part = config.get("teacher")
  if not part:
    return None
  single = part.get("ema") is True or "model_name" in part
  return part if single else dict.fromkeys(part)


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
    if config.get("ema_width") is None:
      check_number(key, config.get("ema_decay"), least=0, below=1)
    _, model = building.model(config)
    return Teacher(model, {"teacher": {}}, lambda: {"teacher": {}})
  if "model_name" not in part:
    return _joined(
      {
        name: from_config(config, task, batch_spec, mesh, seed, part[name])
        for name in part
      }
    )
  module, model = building.model(part)
  source = part["model_init"]
  if isinstance(source, settings.Config):
    source = part.kwargs("model_init")
  if source is not None:
    warm_start.check_published(source, module, model, path=part.path)
  # Teachers may see images of their own, such as larger ones: "teacher_image",
  # or with the name of one of several teachers.
  for name in ("teacher", part.path.rpartition(".")[2]):
    if f"{name}_image" in batch_spec:
      batch_spec = {**batch_spec, "image": batch_spec[f"{name}_image"]}
  init = initial.variables_fn(task, model, batch_spec, seed)
  try:
    rules = initial.sharding_rules(config, init, module, model, part)
  except TypeError as e:
    raise ConfigError(
      f"{part.path}.model_name: {part['model_name']!r} does not take the "
      f"inputs of the task's model. {e}"
    ) from e
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


def _joined(teachers: Mapping[str, Teacher]) -> Teacher:
  """Several teachers as one, with models and variables by name."""

  def load() -> dict[str, Any]:
    variables = {name: x.load()["teacher"] for name, x in teachers.items()}
    return {"teacher": variables}

  specs = {name: x.spec["teacher"] for name, x in teachers.items()}
  models = {name: x.model for name, x in teachers.items()}
  return Teacher(models, {"teacher": specs}, load)
