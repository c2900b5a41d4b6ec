"""Converts a GGUF file, as used by llama.cpp, to a published model's folder.

  pip install 'bigtrain[gguf,text]'
  python -m bigtrain.tools.gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
  python -m bigtrain.tools.generate --model=models/smollm2 --chat \\
      --prompt="What is the capital of France?"

Quantised arrays are dequantised by the package gguf. The file's metadata become
config.json, tokenizer.json and the chat template. Only the architecture llama
is supported, which Mistral and SmolLM2 use too.

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
from bigtrain.config.errors import ConfigError, check_choice, import_package
from bigtrain.files import paths
from bigtrain.tools import arguments, exits

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

# {key of config.json: key of the metadata, after "llama."}
_SIZES = {
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "max_position_embeddings": "context_length",
}
# {name of an array in GGUF: its name in transformers}, outside the layers and,
# after "blk.N." and "model.layers.N.", within them.
_OUTER_ARRAYS = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
_LAYER_ARRAYS = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
# {tokenizer.ggml.pre of a byte-level BPE: whether it splits digits first}
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
# tokenizer.ggml.token_type of tokens that are not text, such as end tokens.
_CONTROL = 3


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
  tensors = {_name(path, tensor.name): tensor for tensor in reader.tensors}
  config = _config(path, metadata) | {
    "tie_word_embeddings": "lm_head.weight" not in tensors,
    "dtype": dtype,
  }
  num_heads = {
    "q_proj": config["num_attention_heads"],
    "k_proj": config["num_key_value_heads"],
  }

  def arrays() -> Iterator[np.ndarray]:
    for name, tensor in tensors.items():
      array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      projection = name.split(".")[-2]
      if projection in num_heads:
        array = _as_halves(array, num_heads[projection])
      yield array.astype(_DTYPES[dtype])

  # The library lists the sizes of the last axis first.
  specs = {
    name: (tuple(map(int, reversed(tensor.shape))), dtype)
    for name, tensor in tensors.items()
  }
  os.makedirs(out, exist_ok=True)
  file = os.path.join(out, safetensors_files.MODEL)
  safetensors_files.write(file, specs, arrays(), {"format": "pt"})
  files = {"config.json": config, **_tokenizer(path, metadata)}
  for name, content in files.items():
    with open(os.path.join(out, name), "w") as f:
      json.dump(content, f, indent=2)


def _name(path: str, name: str) -> str:
  """Name of an array in transformers."""
  match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
  layer, array, kind = match.groups() if match else (None, name, "")
  names = _OUTER_ARRAYS if layer is None else _LAYER_ARRAYS
  if array not in names:
    raise ConfigError(f"{path}: {name}: an unknown array.")
  prefix = "" if layer is None else f"model.layers.{layer}."
  return f"{prefix}{names[array]}.{kind}"


def _config(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Contents of config.json, without the head and the dtype."""
  architecture = metadata.get("general.architecture")
  if architecture != "llama":
    raise ConfigError(
      f"{path}: architecture {architecture!r}: expected 'llama'."
    )
  if metadata.get("llama.rope.scaling.type", "none") != "none":
    raise ConfigError(f"{path}: scaled rotary embeddings are not supported.")
  try:
    sizes = {name: metadata[f"llama.{key}"] for name, key in _SIZES.items()}
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
    # The file has a float32, whose shortest decimal form is the number that
    # was meant: 1e-5, not 9.999999747378752e-06.
    "rms_norm_eps": float(str(np.float32(eps))),
    "rope_theta": metadata.get("llama.rope.freq_base", 1e4),
    "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
  }


def _as_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Reorders a projection's output features for our rotary embeddings.

  llama.cpp rotates features 2 i and 2 i + 1 of a head together. transformers
  and we rotate feature i of the first half with feature i of the second.
  """
  pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _tokenizer(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {file: content}; {}, with a warning, for an unknown kind."""

  def get(name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}")

  splits_digits = _SPLITS_DIGITS.get(get("pre") or "gpt-2")
  if get("model") != "gpt2" or splits_digits is None:
    logging.warning(
      "%s: a tokenizer of the kind %r, %r is not supported; put the model's "
      "tokenizer.json or tokenizer.model into the folder.",
      path,
      get("model"),
      get("pre"),
    )
    return {}
  hf = import_package(
    "tokenizers", f"{path}: writing its tokenizer", "'bigtrain[text]'"
  )
  tokens = get("tokens")
  merges = [tuple(merge.split(" ")) for merge in get("merges")]
  vocab = {token: i for i, token in enumerate(tokens)}
  tokenizer = hf.Tokenizer(hf.models.BPE(vocab, merges))
  pre_tokenizers = [hf.pre_tokenizers.ByteLevel(add_prefix_space=False)]
  if splits_digits:
    digits = hf.pre_tokenizers.Digits(individual_digits=True)
    pre_tokenizers.insert(0, digits)
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence(pre_tokenizers)
  tokenizer.decoder = hf.decoders.ByteLevel()
  tokenizer.add_special_tokens(
    [
      hf.AddedToken(tokens[i], normalized=False, special=True)
      for i, kind in enumerate(get("token_type"))
      if kind == _CONTROL
    ]
  )
  special_ids = {
    "bos_token": get("bos_token_id"),
    "eos_token": get("eos_token_id"),
    "pad_token": get("padding_token_id"),
  }
  config: dict[str, Any] = {
    key: None if i is None else tokens[i] for key, i in special_ids.items()
  }
  bos = config["bos_token"]
  if get("add_bos_token") and bos is not None:
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      single=[bos, "$A"],
      pair=[bos, "$A", "$B:1"],
      special_tokens=[(bos, special_ids["bos_token"])],
    )
  if template := metadata.get("tokenizer.chat_template"):
    config["chat_template"] = template
  return {
    "tokenizer.json": json.loads(tokenizer.to_str()),
    "tokenizer_config.json": config,
  }


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
