"""Opens exported folders with transformers or timm and saves their logits.

  python tests/golden/open_exports.py FOLDER...

Each FOLDER has the arguments of the model in inputs.npz; its logits go to
logits.npy, the features of models of images without classes too. Arrays that
are missing, unexpected or misshapen are an error.
"""

import json
import pathlib
import sys

import no_torchvision  # noqa: F401, Before timm.
import numpy as np
import timm
import torch
import transformers


def outputs_of(folder):
  """The logits or features of a model of images."""
  pixels = torch.from_numpy(np.load(folder / "inputs.npz")["pixel_values"])
  if "architecture" in json.loads((folder / "config.json").read_text()):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()(pixels).detach().numpy()
  config = transformers.AutoConfig.from_pretrained(folder)
  kind = transformers.AutoModel
  if "ImageClassification" in config.architectures[0]:
    kind = transformers.AutoModelForImageClassification
  model, info = kind.from_pretrained(folder, output_loading_info=True)
  kept = {x for x in info.pop("missing_keys") if "mask_token" not in x}
  if kept or any(info.values()):
    raise SystemExit(f"{folder}: {kept}, {info}")
  result = model.eval()(pixel_values=pixels)
  return result[1 if "last_hidden_state" in result else 0].detach().numpy()


def logits_of_pictures(folder):
  """Logits of a model that reads texts and pictures."""
  model, info = transformers.AutoModelForImageTextToText.from_pretrained(
    folder,
    output_loading_info=True,
    attn_implementation="eager",
    dtype=torch.float32,
  )
  if any(info.values()):
    raise SystemExit(f"{folder}: {info}")
  inputs = np.load(folder / "inputs.npz")
  tensors = {name: torch.from_numpy(inputs[name]) for name in inputs}
  with torch.no_grad():
    return model.eval()(**tensors).logits.numpy()


def logits_of(folder):
  """Returns float32 [B, L, V]."""
  config = transformers.AutoConfig.from_pretrained(folder)
  kind = transformers.AutoModelForCausalLM
  if config.is_encoder_decoder:
    kind = transformers.AutoModelForSeq2SeqLM
  if config.model_type == "mistral4":  # Not in the list of the automatic class.
    kind = transformers.models.mistral4.Mistral4ForCausalLM
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
    inputs = np.load(path / "inputs.npz")
    compute = outputs_of if "pixel_values" in inputs else logits_of
    if {"pixel_values", "input_ids"} <= {*inputs}:
      compute = logits_of_pictures
    np.save(path / "logits.npy", compute(path))
