"""Small random models as published folders, with a tokenizer."""

import json

import jax
import numpy as np
from models.published import folders

from bigtrain.models import decoder
from bigtrain.text import tokenizers
from support import small_tokenizers

_SIZES = dict(width=16, mlp_dim=24, num_heads=4, max_len=64)


def write(folder, *, padding=0, special=("<|endoftext|>",), **options):
  """Writes a Llama; returns the number of tokens.

  Args:
    padding: rows of the embedding beside those of tokens.
    special: special tokens; the first one ends texts.
    options: fields of the model.
  """
  folder.mkdir()
  name = small_tokenizers.tokenizer_json(folder / "tokenizer.json", special)
  beside = dict(eos_token=special[0], pad_token=special[0])
  (folder / "tokenizer_config.json").write_text(json.dumps(beside))
  size = tokenizers.get(name).vocab_size
  options = dict(variant="llama", **_SIZES) | options
  model = decoder.Model(vocab_size=size + padding, **options)
  variables = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))
  folders.export(decoder, model, variables, folder)
  return size
