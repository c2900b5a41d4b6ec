"""The config.json beside published weights, compared with the model.

The arrays do not show the number of heads, the base of rotary embeddings or the
activation. A warm start with other values would compute other logits, without
any array that does not fit.
"""

import logging
from collections.abc import Mapping
from typing import Any

from bigtrain.checkpoints import (
  parameter_files,
  safetensors_files,
  warm_start,
)
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean


def check(
  spec: str | Mapping[str, Any],
  module: Any,
  model: Any,
  *,
  path: str = "config",
) -> None:
  """Raises ConfigError if a model contradicts the file beside its parameters.

  Fields that the arrays' shapes show are left to the table of the warm start if
  the config has any of the `allow_...` lists for arrays.

  Args:
    spec: `model_init`, see warm_start.py.

  Raises:
    ConfigError: fields that differ, unless `allow_changed` names them; an
      architecture that the module does not compute.
  """
  key = f"{path}.model_init"
  source = warm_start.read_source(spec, key)
  file = paths.absolute(source.path)
  published = safetensors_files.is_folder(file) or file.endswith(".safetensors")
  if not published or not hasattr(module, "published_fields"):
    return
  arrays = parameter_files.open_file(
    source.path, step=source.step, prefix=source.prefix, key=key
  ).specs
  fields = module.published_fields(file)
  if fields is None:
    if not any("/" in name for name in arrays):  # Not names of ours.
      logging.warning(
        "%s: there is no config.json beside %s, so its number of heads, its "
        "rotary embeddings and the like cannot be compared with %s.model.",
        *(key, file, path),
      )
    return
  for name in source.allow_changed:
    if name not in fields:
      raise ConfigError(
        f"{key}.allow_changed: {fields.path} does not determine {name!r}."
        f"{did_you_mean(name, fields)}"
      )
  messages = fields.contradictions(model, arrays, f"{path}.model")
  may_differ = any(getattr(source, field) for field in warm_start.ALLOWED)
  wrong = [
    message
    for name, message in messages.items()
    if name not in source.allow_changed
    and not (fields[name].in_shapes and may_differ)
  ]
  if wrong:
    raise ConfigError(
      f"{key}: {fields.path} contradicts {path}.model: {'; '.join(wrong)}. "
      f"{path}.model = dict(published=PATH) takes the file's values; "
      f"{key}.allow_changed lists fields that may differ."
    )
