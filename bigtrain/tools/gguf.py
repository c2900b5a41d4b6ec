"""Writes a GGUF file, as llama.cpp reads it, as a published model's folder.

  pip install 'bigtrain[gguf,text]'
  python -m bigtrain.tools.gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
  python -m bigtrain.tools.generate --model=models/smollm2 --chat \\
      --prompt="What is the capital of France?"

Quantised arrays are computed by the package gguf. The file's metadata become
config.json, tokenizer.json and the chat template. Files of the architecture
llama are read, which are also Mistral's and SmolLM2's.

Exit codes: 0; 2 for a wrong argument or without the package gguf.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice, import_package
from bigtrain.files import paths
from bigtrain.tools import arguments, exits

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_TABLES = settings.read_table(__file__, "gguf.toml")
_CONTROL = 3  # tokenizer.ggml.token_type of tokens that are no text.


def convert(path: str, out: str, dtype: str = "float32") -> None:
  check_choice("--dtype", dtype, _DTYPES)
  gguf = import_package("gguf", f"{path}: reading it", "'bigtrain[gguf]'")
  out = paths.absolute(out)
  if os.path.isdir(out) and os.listdir(out):
    raise ConfigError(f"{out}: expected a new or an empty folder.")
  try:
    reader = gguf.GGUFReader(paths.absolute(path))
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path}: not a GGUF file: {e}") from e
  metadata = {name: x.contents() for name, x in reader.fields.items()}
  names = {_name(path, tensor.name): tensor for tensor in reader.tensors}
  config = _config(path, metadata) | {
    "tie_word_embeddings": "lm_head.weight" not in names,
    "dtype": dtype,
  }
  heads = {
    "q_proj": config["num_attention_heads"],
    "k_proj": config["num_key_value_heads"],
  }

  def arrays() -> Iterator[np.ndarray]:
    for name, tensor in names.items():
      array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      number = heads.get(name.split(".")[-2])
      yield (_as_halves(array, number) if number else array).astype(
        _DTYPES[dtype]
      )

  # The library lists the sizes of the last axis first.
  specs = {
    name: (tuple(map(int, reversed(tensor.shape))), dtype)
    for name, tensor in names.items()
  }
  os.makedirs(out, exist_ok=True)
  file = os.path.join(out, safetensors_files.MODEL)
  safetensors_files.write(file, specs, arrays(), {"format": "pt"})
  files = {"config.json": config, **_tokenizer(path, metadata)}
  for name, content in files.items():
    with open(os.path.join(out, name), "w") as f:
      json.dump(content, f, indent=2)


def _name(path: str, name: str) -> str:
  match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
  layer, part, kind = match.groups() if match else (None, name, "")
  known = _TABLES["outside" if layer is None else "layer"]
  if part not in known:
    raise ConfigError(f"{path}: {name}: an array that is not known.")
  prefix = "" if layer is None else f"model.layers.{layer}."
  return f"{prefix}{known[part]}.{kind}"


def _config(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Contents of config.json but for the head and the dtype."""
  kind = metadata.get("general.architecture")
  if kind != "llama":
    raise ConfigError(f"{path}: architecture {kind!r}: expected 'llama'.")
  if metadata.get("llama.rope.scaling.type", "none") != "none":
    raise ConfigError(f"{path}: scaled rotary embeddings are not read.")
  try:
    keys = _TABLES["sizes"].items()
    sizes = {name: metadata[f"llama.{key}"] for name, key in keys}
    eps = metadata["llama.attention.layer_norm_rms_epsilon"]
  except KeyError as e:
    raise ConfigError(f"{path}: {e.args[0]}: missing.") from e
  head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    **sizes,
    "head_dim": metadata.get("llama.attention.key_length", head_dim),
    "hidden_act": "silu",
    # The file has float32, of which 1e-5 is the shortest spelling.
    "rms_norm_eps": float(str(np.float32(eps))),
    "rope_theta": metadata.get("llama.rope.freq_base", 1e4),
    "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
  }


def _as_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows of features 2 i and 2 i + 1 of a head -> those of its two halves."""
  pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _tokenizer(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:

  def get(name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}")

  tokens, splits = get("tokens"), _TABLES["splits"].get(get("pre") or "gpt-2")
  if get("model") != "gpt2" or splits is None:
    logging.warning(
      "%s: a tokenizer of the kind %r, %r is not read; put the model's "
      "tokenizer.json or tokenizer.model into the folder.",
      path,
      get("model"),
      get("pre"),
    )
    return {}
  by = f"{path}: writing its tokenizer"
  hf = import_package("tokenizers", by, "'bigtrain[text]'")
  merges = [tuple(merge.split(" ")) for merge in get("merges")]
  vocab = {token: i for i, token in enumerate(tokens)}
  made = hf.Tokenizer(hf.models.BPE(vocab, merges))
  before = [hf.pre_tokenizers.Digits(individual_digits=True)] * splits
  before.append(hf.pre_tokenizers.ByteLevel(add_prefix_space=False))
  made.pre_tokenizer = hf.pre_tokenizers.Sequence(before)
  made.decoder = hf.decoders.ByteLevel()
  special = [i for i, kind in enumerate(get("token_type")) if kind == _CONTROL]
  made.add_special_tokens(
    [hf.AddedToken(tokens[i], normalized=False, special=True) for i in special]
  )
  kinds = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
  ids = {key: get(f"{kind}_token_id") for key, kind in kinds.items()}
  named: dict[str, Any] = {
    key: None if i is None else tokens[i] for key, i in ids.items()
  }
  bos = named["bos_token"]
  if get("add_bos_token") and bos is not None:
    made.post_processor = hf.processors.TemplateProcessing(
      single=[bos, "$A"],
      pair=[bos, "$A", "$B:1"],
      special_tokens=[(bos, ids["bos_token"])],
    )
  if template := metadata.get("tokenizer.chat_template"):
    named["chat_template"] = template
  content = json.loads(made.to_str())
  return {"tokenizer.json": content, "tokenizer_config.json": named}


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  parser = arguments.JaxParser("gguf", __doc__, changes_config=False)
  parser.add_argument("path", help="a .gguf file")
  parser.add_argument("out", help="a new folder")
  parser.add_argument(
    "--dtype",
    default="float32",
    help="dtype of the arrays (default: %(default)s)",
  )
  args, _ = parser.parse(argv)
  convert(**vars(args))
  return 0


if __name__ == "__main__":
  sys.exit(main())
