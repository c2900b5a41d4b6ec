"""What a run reads from the folder of a published model, besides arrays.

It reads the sizes, which replace config.model.published, and the name of the
layout in which the run's model will be exported.
"""

import json
from collections.abc import Mapping
from typing import Any

from bigtrain.checkpoints import folders
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.config.modules import find_module
from bigtrain.files import paths

# Errors of sources that are not there, or not what they should be.
_UNREADABLE = (
  ConfigError,
  CheckpointError,
  AttributeError,
  LookupError,
  OSError,
  TypeError,
  ValueError,
)
# Key of config.model: a folder whose config.json gives the sizes.
PUBLISHED = "published"
# Key of the config: model_type of the published model that the run began with.
LAYOUT = "published_layout"


def with_published_sizes(config: settings.Config) -> settings.Config:
  """Puts a published model's sizes in place of config.model.published.

  The run saves them, so its checkpoints do not need the published folder.
  """
  plain = config.to_dict()
  layout = layout_of(plain)
  # The parts of a config that name a model: itself, its teacher, or several.
  parts: dict[str, Any] = {config.path: plain}
  if plain.get("teacher"):
    path = f"{config.path}.teacher"
    parts[path] = plain["teacher"]
    teachers = config.kwargs("teacher")  # ConfigError if it is not a dict.
    if "model_name" not in teachers:
      for name, teacher in plain["teacher"].items():
        parts[f"{path}.{name}"] = teacher
  for path, part in parts.items():
    model = part.get("model") if isinstance(part, dict) else None
    if isinstance(model, dict) and model.get(PUBLISHED) is not None:
      part["model"] = _published_sizes(part, path)
  if layout:
    plain[LAYOUT] = layout
  result = settings.Config(plain)
  result.get(LAYOUT)  # It counts as read.
  return result


def layout_of(config: Mapping[str, Any]) -> str | None:
  """The model_type of the published model that a run began with, if any.

  The run may have begun with another run that began with a folder.
  """
  if config.get(LAYOUT):
    return str(config[LAYOUT])
  model = config.get("model")
  published = model.get(PUBLISHED) if isinstance(model, Mapping) else None
  init = config.get("model_init")
  options = init if isinstance(init, Mapping) else {"path": init}
  source = options.get("path")
  # Whoever reads these folders says what is wrong with them.
  for path in (published, source):
    if not isinstance(path, str) or not path:
      continue
    try:
      if safetensors_files.is_folder(paths.absolute(path)):
        module = find_module("models", str(config.get("model_name")), "")
        unread = options.get("allow_unread", ())
        fields = module.published_fields(path, unread)
        return fields and fields.model_type
      if path.endswith((".npz", ".safetensors")):  # An export of a run.
        about = json.loads(paths.read_bytes(f"{paths.absolute(path)}.json"))
        return layout_of(about["config"])
      if path == source:
        directory = folders.find_named(path, options.get("step"), "")
        host = folders.read_manifest(directory).host_state
        return layout_of(host.config or {})
    except _UNREADABLE:
      continue
  return None


def _published_sizes(part: Mapping[str, Any], path: str) -> dict[str, Any]:
  options = dict(part["model"])
  folder, name = options.pop(PUBLISHED), str(part.get("model_name"))
  module = find_module("models", name, f"{path}.model_name")
  key = f"{path}.model.{PUBLISHED}"
  if not hasattr(module, "published_fields"):
    raise ConfigError(
      f"{key}: the model {name!r} takes no sizes from a folder."
    )
  if options.get("variant") is not None:
    raise ConfigError(
      f"{path}.model.variant={options['variant']!r}: expected none beside "
      f"{key}, which gives all sizes."
    )
  init = part.get("model_init")
  init_options = init if isinstance(init, dict) else {}
  fields = module.published_fields(folder, init_options.get("allow_unread", ()))
  if fields is None:
    raise ConfigError(
      f"{key}: expected the folder of a published model, with a config.json, "
      f"got {folder!r}."
    )
  allowed = [*init_options.get("allow_changed", ())]
  if init_options.get("upcycle"):  # Experts in place of the file's MLPs.
    allowed.append("moe")
  if "vocab_size" in fields and path == "config":
    size = options.get("vocab_size")
    if isinstance(size, int) and size > fields["vocab_size"].value:
      allowed.append("vocab_size")  # See new_rows.py.
  return fields.merge(options, allowed, f"{path}.model")
