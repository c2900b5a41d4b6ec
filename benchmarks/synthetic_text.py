"""Configs and data source of captions and texts with random tokens.

--config=benchmarks/synthetic_text.py:kind=captioner,batch_size=8
--config=benchmarks/synthetic_text.py:kind=decoder,length=256,batch_size=2
"""

from typing import Any

import numpy as np

from benchmarks import pool, synthetic
from configs import common

_POOL = 64  # Number of different examples.


def get_config(arg: str | None = None) -> Any:
  """A training config.

  Args:
    arg: kind ("captioner" or "decoder"), variant and depth (defaults by kind),
      decoder_depth of a captioner, width of a decoder, num_kv_heads, mlp_dim
      and tied_head of a Llama, vocab_size, length of the texts in tokens, size
      of the images in pixels, batch_size, scan, dtype.
  """
  options = common.parse_arg(
    arg,
    kind="captioner",
    variant=None,
    depth=None,
    width=None,
    num_kv_heads=None,
    mlp_dim=None,
    tied_head=False,
    decoder_depth=6,
    vocab_size=32_000,
    length=64,
    size=64,
    batch_size=8,
    scan=False,
    dtype="float32",
  )
  captions = options.kind == "captioner"
  config = synthetic.get_config(f"batch_size={options.batch_size}")
  config.input.data = dict(
    type="benchmarks.synthetic_text",
    vocab_size=options.vocab_size,
    length=options.length,
    size=options.size if captions else None,
  )
  config.model = dict(
    depth=options.depth,
    vocab_size=options.vocab_size,
    max_len=options.length,
    scan=options.scan,
    dtype=options.dtype,
  )
  if captions:
    config.task, config.model_name = "captioning", "cappa"
    config.loss = dict(masked_pred_prob=0.75)
    config.model.variant = options.variant or "S/16"
    config.model.decoder_depth = options.decoder_depth
    config.model.decoder_bias = False
    config.model.mask_token = True
  else:
    config.task, config.model_name = "language_modeling", "decoder"
    config.loss = {}
    config.model.variant = options.variant or "gpt2_124m"
    if options.width:
      config.model.width = options.width
      config.model.num_heads = options.width // 64
    if options.num_kv_heads:  # A Llama: its MLPs have three matrices.
      config.model.num_kv_heads = options.num_kv_heads
      mlp_dim = options.mlp_dim or 256 * round(options.width * 8 / 3 / 256)
      config.model.mlp_dim = mlp_dim
    if options.tied_head:
      config.model.tied_head = True
  return config


class Source(pool.Pool):
  """Captions (`image`, `labels`) or texts (`tokens`, `targets`) at random.

  Args:
    vocab_size: V. No token is 0, which pads captions.
    length: L, tokens per example.
    size: height and width of the images in pixels; None for texts.
  """

  def __init__(self, vocab_size: int, length: int, size: int | None = None):
    rng = np.random.default_rng(0)
    shape = (_POOL, length + 1)
    tokens = rng.integers(1, vocab_size, size=shape, dtype=np.int32)
    arrays: dict[str, np.ndarray] = {"labels": tokens[:, 1:]}
    if size is None:
      arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    else:
      image = rng.normal(size=(_POOL, size, size, 3))
      arrays["image"] = image.astype(np.float32)
    super().__init__(arrays, "synthetic text")
