"""Opens adapters with PEFT, on their bases, and saves their logits.

  python tests/golden/open_adapters.py FOLDER...

adapter_config.json of each FOLDER names the base, and tokens.npy has the token
ids; the logits go to logits.npy. Arrays without a place in the model, and
factors that are missing, are an error.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import safetensors.torch
import torch
import transformers


def logits_of(folder):
  """Returns float32 [B, L, V], or [B, C] of a classifier."""
  about = json.loads((folder / "adapter_config.json").read_text())
  kind, options = transformers.AutoModelForCausalLM, {}
  arrays = safetensors.torch.load_file(folder / "adapter_model.safetensors")
  if about["task_type"] == "SEQ_CLS":
    kind = transformers.AutoModelForSequenceClassification
    options["num_labels"] = len(arrays["base_model.model.score.weight"])
  model = kind.from_pretrained(
    about["base_model_name_or_path"],
    attn_implementation="eager",
    experts_implementation="eager",
    dtype=torch.float32,
    **options,
  )
  model.config.pad_token_id = -1
  model = peft.PeftModel.from_pretrained(model, folder)
  written = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
  for name, x in arrays.items():
    if name not in written or not torch.equal(written[name], x):
      raise SystemExit(f"{folder}: PEFT does not have {name}.")
  missing = [x for x in set(written) - set(arrays) if "bias" not in x]
  if missing:
    raise SystemExit(f"{folder}: {missing} are not in the file.")
  tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
  with torch.no_grad():
    return model.eval()(input_ids=tokens).logits.numpy()


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:]):
    np.save(path / "logits.npy", logits_of(path))
