"""A published model's sizes in place of config.model.published."""

from collections.abc import Mapping
from typing import Any

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.config.modules import find_module

# Key of config.model: a folder whose config.json gives the sizes.
PUBLISHED = "published"


def with_published_sizes(config: settings.Config) -> settings.Config:
  """Puts a published model's sizes in place of config.model.published.

  The run saves them, so its checkpoints do not need the published folder.
  """
  plain = config.to_dict()
  # The parts of a config that name a model: itself, its teacher, or several.
  parts: dict[str, Any] = {config.path: plain}
  if plain.get("teacher"):
    path = f"{config.path}.teacher"
    parts[path] = plain["teacher"]
    teachers = config.kwargs("teacher")  # ConfigError if it is no dict.
    if "model_name" not in teachers:
      for name, teacher in plain["teacher"].items():
        parts[f"{path}.{name}"] = teacher
  for path, part in parts.items():
    model = part.get("model") if isinstance(part, dict) else None
    if isinstance(model, dict) and model.get(PUBLISHED) is not None:
      part["model"] = _published_sizes(part, path)
  return settings.Config(plain)


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
  if "vocab_size" in fields and path == "config":
    size = options.get("vocab_size")
    if isinstance(size, int) and size > fields["vocab_size"].value:
      allowed.append("vocab_size")  # See new_rows.py.
  return fields.merge(options, allowed, f"{path}.model")
