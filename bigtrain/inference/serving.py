"""Exports a predict function, to serve it without this program.

The file holds the function and its parameters. It is either ONNX, written by
the library jax2onnx, or StableHLO, which needs only jax to run:

  from jax import export
  exported = export.deserialize(open("model.stablehlo", "rb").read())
  outputs = exported.call({"image": images})

Next to it, a JSON file "model.stablehlo.json" describes inputs and outputs,
class names, preprocessing, tokenizer and step.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config import settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_number,
  import_package,
)
from bigtrain.files import paths
from bigtrain.inference import ops, saved
from bigtrain.inputs.named_features import Features
from bigtrain.objective import building

FORMATS = ("stablehlo", "onnx")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The first one that the task has is exported, unless another one is named.
_PREDS = ("caption", "generate", "logits", "image", "pre_logits")


def export(
  path: str,
  out: str,
  *,
  format: str = "stablehlo",
  step: int | None = None,
  weights: str = "params",
  pred: str = "",
  batch_size: int | None = None,
  platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> tuple[int, int]:
  """Writes a predict function; returns (number of arrays, bytes of the file).

  The exported function accepts any number of examples, or only `batch_size`.
  """
  checkpoint = saved.find(path, step, "export")
  config = settings.Config(checkpoint.config)
  task = building.task(config)
  _, model = building.model(config)
  fns = task.predict_fns(model)
  pred = pred or next((name for name in _PREDS if name in fns), "")
  check_choice("--pred", pred, fns)
  check_choice("--format", format, FORMATS)
  for platform in platforms:
    check_choice("--platforms", platform, PLATFORMS)
  if batch_size is not None:
    check_number("--batch_size", batch_size, least=1, whole=True)
  options = ops.pred_kw(checkpoint.config, pred, None)
  mesh = sharding.make_mesh(devices=jax.local_devices()[:1])
  variables = jax.device_get(saved.variables(checkpoint, weights, mesh))
  read: set[str] = set()  # Names of the features that the function reads.

  def fn(batch: Mapping[str, Any]) -> Any:
    constants = jax.tree.map(jnp.asarray, variables)
    return fns[pred](constants, _Recorded(batch, read), **options)

  specs = _specs(checkpoint, batch_size)
  try:
    jax.eval_shape(fn, specs)  # Fills `read`.
    specs = {name: specs[name] for name in sorted(read)}
    if format == "onnx":
      content, outputs = _onnx(fn, specs)
      platforms = ()
    else:
      exported = jax_export.export(jax.jit(fn), platforms=platforms)(specs)
      content = bytes(exported.serialize())
      outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  except ConfigError:
    raise
  except Exception as e:
    reason = " ".join(str(e).split())[:300]
    hint = "" if batch_size else " Give --batch_size for a fixed one."
    raise ConfigError(
      f"export: {pred} cannot be exported as {format}: {reason}.{hint}"
    ) from e
  about = {
    "step": checkpoint.step,
    "pred": pred,
    "options": options,
    "inputs": _described(specs),
    "outputs": _described(dict(trees.flatten_with_names(outputs))),
    **({"platforms": [*platforms]} if platforms else {}),
    **_about_data(checkpoint),
  }
  with paths.replacing(out, "wb") as file:
    file.write(content)
  with paths.replacing(f"{out}.json") as file:
    file.write(settings.to_json(about, indent=2) + "\n")
  return len(jax.tree.leaves(variables)), os.path.getsize(out)


def _onnx(fn: Any, specs: dict[str, jax.ShapeDtypeStruct]) -> tuple[bytes, Any]:
  """Returns (the content of the file, specs of the outputs).

  jax2onnx replaces whole functions of jax.numpy and flax by ONNX operators, but
  does not support all of their arguments. So it is given the traced primitives
  instead.
  """
  jax2onnx = import_package("jax2onnx", "onnx", "'bigtrain[onnx]'")
  traced, outputs = jax.make_jaxpr(fn, return_shape=True)(specs)
  model = jax2onnx.to_onnx(
    jax.extend.core.jaxpr_as_fun(traced),
    list(specs.values()),
    model_name="bigtrain",
    input_names=list(specs),
    output_names=list(_described(dict(trees.flatten_with_names(outputs)))),
  )
  return model.SerializeToString(), outputs


def _about_data(checkpoint: saved.Saved) -> dict[str, Any]:
  about: dict[str, Any] = {
    "class_names": checkpoint.data.get("class_names", {}).get("labels"),
    "tokenizer": checkpoint.data.get("tokenizer"),
  }
  # There may be no pictures, or no ops without random numbers.
  with contextlib.suppress(ConfigError):
    about["pp"] = ops.find(checkpoint.config, "image", ("logits",)).spec
  return {name: value for name, value in about.items() if value is not None}


class _Recorded(Features):
  """A dict of features that records which of them are read."""

  def __init__(self, batch: Mapping[str, Any], read: set[str]):
    super().__init__(batch, "export")
    self._read = read

  def __getitem__(self, name: str) -> Any:
    self._read.add(name)
    return super().__getitem__(name)


def _specs(
  checkpoint: saved.Saved, batch_size: int | None
) -> dict[str, jax.ShapeDtypeStruct]:
  features = checkpoint.data.get("features")
  if not features:
    raise ConfigError(
      f"export: {checkpoint.path} is of an earlier version and does not have "
      "the shapes of its data; a run that continues from it saves them."
    )
  size: Any = batch_size
  if batch_size is None:
    (size,) = jax_export.symbolic_shape("b")
  return {
    name: jax.ShapeDtypeStruct((size, *shape), np.dtype(dtype))
    for name, (dtype, shape) in features.items()
  }


def _described(specs: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name or "output": {
      "dtype": str(spec.dtype),
      "shape": [n if isinstance(n, int) else str(n) for n in spec.shape],
    }
    for name, spec in specs.items()
  }
