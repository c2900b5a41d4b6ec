"""Writes a tokenizer as the folder that transformers' AutoTokenizer reads."""

import json
import os
import shutil
from typing import Any

from bigtrain.config.errors import ConfigError, import_package
from bigtrain.files import paths
from bigtrain.text import tokenizers

# Files that transformers writes for a tokenizer.
NAMES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "tokenizer.model",
  "vocab.json",
  "merges.txt",
  "added_tokens.json",
)
# Keys of tokenizer_config.json for special tokens without a role: the first is
# of transformers 5, the second of older versions.
_SPECIAL_KEYS = ("extra_special_tokens", "additional_special_tokens")


def write(spec: tokenizers.Spec, out: str) -> None:
  """Writes the files of a tokenizer into a folder, with its new tokens.

  Args:
    spec: argument of `tokenizers.get`, whose file must exist.
    out: the folder; other files in it are left alone.
  """
  path, new = tokenizers.parse(spec)
  source = paths.absolute(path)
  if os.path.isdir(source):
    files = [(name, os.path.join(source, name)) for name in NAMES]
  else:
    name = "tokenizer.json" if source.endswith(".json") else "tokenizer.model"
    files = [(name, source)]
  for name, file in files:
    if os.path.isfile(file):
      shutil.copyfile(file, os.path.join(out, name))
  if any(new):
    _add(new, os.path.join(out, "tokenizer.json"))


def _add(new: tokenizers.NewTokens, path: str) -> None:
  """Adds tokens to a tokenizer.json, and to the files beside it."""
  library = import_package(
    "tokenizers", f"{path}: new tokens", "'bigtrain[text]'"
  )
  model = library.Tokenizer.from_file(path)
  tokenizers.add_tokens(model, new, path)
  with paths.replacing(path) as file:
    file.write(model.to_str(pretty=True))
  ids = {
    token: model.token_to_id(token)
    for token in (*new.new_tokens, *new.new_special_tokens)
  }
  folder = os.path.dirname(path)
  added = os.path.join(folder, "added_tokens.json")
  if os.path.isfile(added):
    _write_json(added, _read_json(added) | ids)
  config_path = os.path.join(folder, "tokenizer_config.json")
  config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
  if os.path.isfile(config_path):
    config = _read_json(config_path)
  if "added_tokens_decoder" in config:
    decoder = model.get_added_tokens_decoder()
    config["added_tokens_decoder"] |= {
      str(i): {
        "content": token,
        "lstrip": decoder[i].lstrip,
        "normalized": decoder[i].normalized,
        "rstrip": decoder[i].rstrip,
        "single_word": decoder[i].single_word,
        "special": decoder[i].special,
      }
      for token, i in ids.items()
    }
  if new.new_special_tokens:
    lists = [x for x in _SPECIAL_KEYS if isinstance(config.get(x), list)]
    key = [*lists, *_SPECIAL_KEYS][0]
    if not isinstance(config.get(key), dict):  # A dict has roles, not a list.
      config[key] = [*(config.get(key) or ()), *new.new_special_tokens]
  _write_json(config_path, config)


def _read_json(path: str) -> dict[str, Any]:
  try:
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path}: cannot be read: {e}.") from e
  return content if isinstance(content, dict) else {}


def _write_json(path: str, content: dict[str, Any]) -> None:
  with paths.replacing(path) as file:
    json.dump(content, file, indent=2, ensure_ascii=False)
