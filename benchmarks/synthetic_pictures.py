"""Texts of random tokens behind a picture of noise, for a SmolVLM."""

import json
import pathlib
from typing import Any

import numpy as np

from benchmarks import pool

_POOL = 8  # Number of different examples.
# SmolVLM-256M: SmolLM2-135M, SigLIP B/16 at 512 pixels, 64 tokens a picture.
SMOLVLM = dict(
  width=576,
  depth=30,
  num_heads=9,
  num_kv_heads=3,
  mlp_dim=1536,
  vocab_size=49_280,
  image_width=768,
  image_depth=12,
  image_heads=12,
  image_mlp_dim=3072,
  image_size=512,
)
QUICK = dict(
  width=64,
  depth=1,
  num_heads=2,
  num_kv_heads=1,
  mlp_dim=64,
  vocab_size=64,
  image_width=64,
  image_depth=1,
  image_heads=2,
  image_mlp_dim=64,
  image_size=64,
)
_PATCH, _MERGE = 16, 4


def image_tokens(size: int) -> int:
  return (size // _PATCH // _MERGE) ** 2


def write_config(folder: str, sizes: dict[str, int]) -> None:
  """Writes the config.json of a SmolVLM, for both programs."""
  config: dict[str, Any] = dict(
    architectures=["SmolVLMForConditionalGeneration"],
    model_type="smolvlm",
    image_token_id=sizes["vocab_size"] - 1,
    scale_factor=_MERGE,
    tie_word_embeddings=False,
    text_config=dict(
      model_type="llama",
      hidden_size=sizes["width"],
      num_hidden_layers=sizes["depth"],
      num_attention_heads=sizes["num_heads"],
      num_key_value_heads=sizes["num_kv_heads"],
      head_dim=sizes["width"] // sizes["num_heads"],
      intermediate_size=sizes["mlp_dim"],
      vocab_size=sizes["vocab_size"],
      max_position_embeddings=8192,
      rms_norm_eps=1e-5,
      rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
      hidden_act="silu",
      tie_word_embeddings=False,
    ),
    vision_config=dict(
      model_type="smolvlm_vision",
      hidden_size=sizes["image_width"],
      num_hidden_layers=sizes["image_depth"],
      num_attention_heads=sizes["image_heads"],
      intermediate_size=sizes["image_mlp_dim"],
      image_size=sizes["image_size"],
      patch_size=_PATCH,
      num_channels=3,
      hidden_act="gelu_pytorch_tanh",
      layer_norm_eps=1e-6,
    ),
  )
  (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))


class Source(pool.Pool):
  """Random tokens behind a picture; every token has a loss.

  Args:
    vocab_size: V; the last token is the image token.
    length: L, tokens per example.
    size: height and width of the pictures in pixels.
  """

  def __init__(self, vocab_size: int, length: int, size: int):
    rng = np.random.default_rng(0)
    shape = (_POOL, length + 1)
    ids = rng.integers(1, vocab_size - 1, size=shape, dtype=np.int32)
    ids[:, : image_tokens(size)] = vocab_size - 1
    image = rng.normal(size=(_POOL, 1, size, size, 3))
    arrays = {
      "tokens": ids[:, :-1],
      "targets": ids[:, 1:],
      "image": image.astype(np.float32),
    }
    super().__init__(arrays, "synthetic picture")
