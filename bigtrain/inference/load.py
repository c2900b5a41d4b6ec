"""`bigtrain.load`: a trained model with its preprocessing and its tokenizer.

model = bigtrain.load("runs/mine")
model.predict("photo.jpg")  # {"label": "cat", "score": 0.97, ...}
model = bigtrain.load("models/dinov3-vits16")          # A published folder.
model = bigtrain.load("models/SmolLM2-135M-Instruct")
model.chat([{"role": "user", "content": "Hello"}])
"""

import os
from collections.abc import Sequence

from bigtrain import sharding
from bigtrain.inference import saved
from bigtrain.inference.ops import Overrides
from bigtrain.inference.predictor import Predictor


def load(
  path: str | os.PathLike[str],
  step: int | None = None,
  weights: str = "params",
  *,
  pp: str | None = None,
  pp_text: str | None = None,
  evaluation: str | None = None,
  class_names: Sequence[str] | str | None = None,
  tokenizer: str | None = None,
  batch_size: int = 32,
  adapter: str | os.PathLike[str] | None = None,
  allow_unread: Sequence[str] = (),
) -> Predictor:
  """Loads a trained model. This reads a run's files and never changes them.

  Args:
    path: a workdir, one of its checkpoints, an export in one file (.npz or
      .safetensors), or the folder of a published model.
    step: step of the workdir's checkpoint; by default the newest one.
    weights: "params", or "ema" for the averaged parameters.
    pp: ops that turn a picture into the model's input, such as
      "decode|resize(224)|value_range(-1,1)"; by default those of an evaluation
      of the run, see bigtrain/inference/ops.py.
    pp_text: ops that turn a text into tokens, such as "tokenize(...)".
    evaluation: name of the evaluation of the run whose ops to use.
    class_names: names by class number, or the path of a file with one name per
      line; by default the names in the run's data.
    tokenizer: "bytes" or a path, if the run's tokenizer has moved.
    batch_size: largest number of examples in a batch, over all devices.
    adapter: a run that trained adapters of this model, or a folder of PEFT's.
    allow_unread: unknown keys of a published config.json to ignore.

  Raises:
    ConfigError: an argument is wrong.
    CheckpointError: the checkpoint is damaged or cannot be read.
  """
  mesh = sharding.make_mesh()
  checkpoint = saved.find(os.fspath(path), step, allow_unread=allow_unread)
  variables = saved.variables(checkpoint, weights, mesh)
  if adapter is not None:
    checkpoint, variables = saved.with_adapter(
      checkpoint, variables, os.fspath(adapter), mesh
    )
  given = Overrides(pp, pp_text, evaluation, class_names, tokenizer)
  return Predictor(checkpoint, variables, mesh, given, batch_size)
