"""Opens exported folders with transformers and saves their logits.

  python tests/golden/open_exports.py FOLDER...

Each FOLDER has the arguments of the model in inputs.npz; its logits go to
logits.npy. Arrays that are missing, unexpected or misshapen are an error.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers


def logits_of(folder):
  """Returns float32 [B, L, V]."""
  config = transformers.AutoConfig.from_pretrained(folder)
  kind = transformers.AutoModelForCausalLM
  if config.is_encoder_decoder:
    kind = transformers.AutoModelForSeq2SeqLM
  classifies = "ForSequenceClassification" in (config.architectures or [""])[0]
  if classifies:
    kind = transformers.AutoModelForSequenceClassification
  model, info = kind.from_pretrained(
    folder,
    output_loading_info=True,
    attn_implementation="eager",
    experts_implementation="eager",
    dtype=torch.float32,
  )
  if any(info.values()):
    raise SystemExit(f"{folder}: {info}")
  if classifies:  # The library reads the last token that is not this one.
    model.config.pad_token_id = -1
  inputs = np.load(folder / "inputs.npz")
  tensors = {name: torch.from_numpy(inputs[name]) for name in inputs}
  with torch.no_grad():
    return model.eval()(**tensors).logits.numpy()


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:]):
    np.save(path / "logits.npy", logits_of(path))
