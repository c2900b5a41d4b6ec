"""A saved model that looks at the images made by another model.

Evaluators use its features to compare images, or its classes to count how many
images it recognises. The model may be a run's workdir, an export, or the folder
of a published model.

Legend: B batch, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays.types import Variables
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice, check_kwargs
from bigtrain.config.modules import find_module
from bigtrain.inference import saved

_COLOURS = 255


class Model:
  """The predict function of a saved model, for images from -1 to 1.

  Images are first rounded to the 256 levels of image files. Then they are
  scaled to values from 0 to 1, resized, and normalised with `mean` and `std`.

  Args:
    key: where the config has these options, for messages.
    path: the folder or the export.
    pred: a predict function of the model's task, of {"image": ...}.
    pred_kw: its options, such as dict(layer="encoded", pool=True).
    step: step of a workdir's checkpoint; by default the newest one.
    weights: "params" or "ema".
    size: rows and columns that the model expects; by default no resizing.
    channels: number of channels; grey images are repeated.
    mean: of pixels, one for each channel or for all.
    std: likewise; by default, the model gets values from -1 to 1.
  """

  def __init__(
    self,
    mesh: Mesh,
    key: str,
    path: str,
    *,
    pred: str = "pre_logits",
    pred_kw: Mapping[str, Any] | None = None,
    step: int | None = None,
    weights: str = "params",
    size: int | None = None,
    channels: int | None = None,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
  ):
    checkpoint = saved.find(path, step, f"{key}.path")
    predict = _predict_fn(checkpoint.config, pred, pred_kw or {}, key)
    self._variables = saved.variables(checkpoint, weights, mesh)

    def look(variables: Variables, image: jax.Array) -> Any:
      x = jnp.clip((image.astype(jnp.float32) + 1) / 2, 0, 1)
      x = jnp.round(x * _COLOURS) / _COLOURS
      if size is not None and x.shape[1:3] != (size, size):
        x = jax.image.resize(x, (len(x), size, size, x.shape[-1]), "cubic")
      if channels is not None and x.shape[-1] == 1:
        x = jnp.repeat(x, channels, axis=-1)
      x = (x - jnp.asarray(mean)) / jnp.asarray(std)
      return predict(variables, {"image": x})

    replicated = sharding.replicated(mesh)
    self._look: Callable[..., Any] = jax.jit(look, out_shardings=replicated)

  def __call__(self, image: jax.Array) -> Any:
    """Images (B, rows, columns, C) -> what the predict function returns."""
    return self._look(self._variables, image)


def check(options: Mapping[str, Any], key: str) -> None:
  """Raises ConfigError if `options` are not arguments of a `Model`."""
  check_kwargs(Model, options, key, given=("mesh", "key"))
  checkpoint = saved.find(options["path"], options.get("step"), f"{key}.path")
  pred = options.get("pred", "pre_logits")
  _predict_fn(checkpoint.config, pred, options.get("pred_kw") or {}, key)


def _predict_fn(
  plain: Mapping[str, Any], name: str, options: Mapping[str, Any], key: str
) -> Callable[..., Any]:
  config = settings.Config(dict(plain))
  for part in ("adapters", "quantize"):
    if config.get(part):
      raise ConfigError(
        f"{key}.path: expected a model without config.{part}; export it first."
      )
  # Not by objective.building, which would forget the choices of the run.
  task = find_module("tasks", config.task, f"{key}.path: config.task")
  module = find_module("models", config.model_name, f"{key}.path: model_name")
  fns = task.predict_fns(module.Model(**config.kwargs("model")))
  check_choice(f"{key}.pred", name, fns, "the model's task has none named")
  check_kwargs(fns[name], options, f"{key}.pred_kw", ("variables", "batch"))

  def predict(variables: Variables, batch: Any) -> Any:
    return fns[name](variables, batch, **options)

  return predict
