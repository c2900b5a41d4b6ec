"""A weighted sum of tasks over one model: config.task as a dict by name.

  config.task = dict(
    caption=dict(type="captioning", weight=1.0, loss=dict(z_loss=1e-4)),
    pairs=dict(type="contrastive", weight=0.5, from_percent=80),
  )

Each task sees the batch, with `features` renamed or left out, or the batch of a
separate `input`. A `TaskSum` has the functions of a task's module, so that code
that initialises a model or predicts with it need not know about the sum.
task_schedule.py says which tasks a step has, and task_gradients.py adds up
their gradients.
"""

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays.types import Batch, PredictFn
from bigtrain.config.errors import ConfigError, check_choice, did_you_mean
from bigtrain.config.modules import find_module
from bigtrain.config.settings import Config
from bigtrain.inputs.named_features import Features

_NAME = re.compile(r"[A-Za-z_]\w*")
# Prefixes of the program's own metrics, as in "lr/critic".
_OTHER_METRICS = ("lr", "grad_norm", "account")


class Entry(NamedTuple):
  """One task of a config."""

  name: str  # "" for the only task of a run.
  module: Any
  part: Config  # Has its "loss"; the whole config for the only task.
  # {feature of the task: feature of the batch, or None to leave it out}.
  features: Mapping[str, str | None] = {}
  has_input: bool = False  # Whether it has an input of its own.
  # The one of several optimizers whose parameters it trains; None for all.
  optimizer: str | None = None

  @property
  def loss_key(self) -> str:
    return f"{self.part.path}.loss"

  @property
  def input_key(self) -> str:
    """The config key of the task's input, for messages about features."""
    if self.has_input:
      return f"{self.part.path}.input"
    return f"{self.part.path}: config.input" if self.name else "config.input"

  def view(self, batch: Batch) -> Batch:
    """The task's features, from a step's batch of all inputs' features."""
    if not self.name:
      return batch
    if self.has_input:
      prefix = feature_prefix(self.name)
      return {
        name.removeprefix(prefix): x
        for name, x in batch.items()
        if name.startswith(prefix)
      }
    shared = {name: x for name, x in batch.items() if "/" not in name}
    result = {
      name: x for name, x in shared.items() if name not in self.features
    }
    for name, source in self.features.items():
      if source is not None:
        result[name] = shared[source]
    return result

  def check_features(self, names: Collection[str]) -> None:
    """Raises ConfigError if `features` names one that the batch lacks."""
    for name, source in self.features.items():
      if source is not None and source not in names:
        hint = did_you_mean(source, [n for n in names if n[0] != "_"])
        raise ConfigError(
          f"{self.part.path}.features.{name}: config.input makes no feature "
          f"{source!r}.{hint}"
        )

  def named_as_in_batch(self, sizes: Mapping[str, int]) -> dict[str, int]:
    """Renames keys from the task's names of features to those in the batch."""
    if self.has_input:
      prefix = feature_prefix(self.name)
      return {f"{prefix}{name}": x for name, x in sizes.items()}
    result = {}
    for name, x in sizes.items():
      source = self.features.get(name, name)
      if source is not None:
        result[source] = x
    return result

  def metric(self, name: str) -> str:
    return f"{self.name}/{name}" if self.name else name


def feature_prefix(name: str) -> str:
  """Prefix of the names of features that come from a task's own input."""
  return f"{name}/"


def add_sizes(sizes: dict[str, int], others: Mapping[str, int]) -> None:
  """Merges vocabulary sizes; where both have one, the smaller one counts."""
  for name, size in others.items():
    if name not in sizes or size < sizes[name]:
      sizes[name] = size


class TaskSum:
  """Several tasks, with the functions of a task's module."""

  def __init__(self, entries: Sequence[Entry]):
    self.entries = entries

  def init_inputs(self, batch: Batch) -> list[Batch]:
    """Arguments with which each task calls the model, see initial.py."""
    return [
      entry.module.inputs(Features(entry.view(batch), entry.input_key))
      for entry in self.entries
    ]

  def vocab_sizes(self, model: Any) -> dict[str, int]:
    return self._sizes("vocab_sizes", model)

  def class_counts(self, model: Any) -> dict[str, int]:
    return self._sizes("class_counts", model)

  def _sizes(self, function: str, model: Any) -> dict[str, int]:
    """The smallest size of each feature, by the tasks' own names."""
    result: dict[str, int] = {}
    for entry in self.entries:
      if hasattr(entry.module, function):
        add_sizes(result, getattr(entry.module, function)(model))
    return result

  def predict_fns(
    self, model: Any, teacher: Any = None
  ) -> dict[str, PredictFn]:
    """The tasks' functions as "NAME/function"; "function" is the first one."""
    result: dict[str, PredictFn] = {}
    for entry in self.entries:
      parameters = inspect.signature(entry.module.predict_fns).parameters
      options = {"teacher": teacher} if "teacher" in parameters else {}
      for name, fn in entry.module.predict_fns(model, **options).items():
        result[f"{entry.name}/{name}"] = fn
        result.setdefault(name, fn)
    return result


def read(config: Config) -> TaskSum:
  """Reads config.task, a dict; weights are read by task_schedule.py."""
  tasks = config.task
  if not len(tasks):
    raise ConfigError("config.task: expected a task's name, or tasks by name.")
  if "type" in tasks and isinstance(tasks.get("type"), str):
    raise ConfigError(
      "config.task: expected the name of a task, or a dict of tasks by name "
      f"such as dict(main=dict(type={tasks['type']!r}, weight=1.0))."
    )
  entries = []
  for name in tasks:
    part = tasks[name]
    if not _NAME.fullmatch(name):
      raise ConfigError(
        f"config.task: expected a name of letters and digits, got {name!r}; "
        "its metrics are named after it."
      )
    if name in _OTHER_METRICS:
      raise ConfigError(
        f"{tasks.path}.{name}: expected another name; {name}/... are metrics "
        "of the program itself."
      )
    if not isinstance(part, Config):
      raise ConfigError(
        f"{tasks.path}.{name}: expected dict(type=..., weight=...), got "
        f"{part!r}."
      )
    if config.get("loss"):
      raise ConfigError(
        f"config.loss: with several tasks, each has its own: {part.path}.loss."
      )
    if "type" not in part:
      others = [other for other in tasks if other != name]
      hint = did_you_mean(name, others) or " Expected a task's name."
      raise ConfigError(f"{part.path}.type: missing.{hint}")
    module = find_module("tasks", part["type"], f"{part.path}.type")
    if hasattr(module, "rollout") or hasattr(module, "gradients_fn"):
      raise ConfigError(
        f"{part.path}.type={part['type']!r}: makes its own batches or "
        "gradients, so it must be the only task."
      )
    entries.append(
      Entry(
        name,
        module,
        part,
        part.kwargs("features"),
        "input" in part,
        part.get("optimizer"),
      )
    )
  return TaskSum(entries)


def check(
  entries: Sequence[Entry], config: Config, features: Collection[str]
) -> None:
  """Raises ConfigError for wrong features, and for metrics written twice."""
  evals = config.get("evals") or ()
  for entry in entries:
    if not entry.name:
      continue
    entry.check_features(features)
    if entry.optimizer is not None:
      key = f"{entry.part.path}.optimizer"
      check_choice(key, entry.optimizer, config.get("optimizers") or ())
    if entry.name in evals:
      raise ConfigError(
        f"{entry.part.path} and config.evals.{entry.name}: both would write "
        f"metrics such as {entry.name}/loss; give them different names."
      )


def entries(task: Any, config: Config) -> Sequence[Entry]:
  """The tasks of a run, one or several."""
  if isinstance(task, TaskSum):
    return task.entries
  return [Entry("", task, config)]
