"""Makes classifiers/: small random classifiers of texts, by transformers.

Each folder has the output of save_pretrained, and reference.npz: tokens that
end in padding (id 0), and the logits of each class. requirements.txt has the
library's version.

  python tests/golden/make_classifiers.py   # writes the folders anew
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

SIZES = dict(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  bos_token_id=None,
  eos_token_id=None,
  pad_token_id=0,
)
# {folder: (model_type, number of classes)}; one class is a reward.
FOLDERS = {"llama": ("llama", 3), "qwen3": ("qwen3", 1)}


def write_folder(kind, num_labels, out):
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  config = transformers.AutoConfig.for_model(
    kind, **SIZES, head_dim=8, num_labels=num_labels
  )
  model = transformers.AutoModelForSequenceClassification.from_config(
    config, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  with torch.no_grad():
    for x in model.parameters():
      x.add_(torch.from_numpy(rng.normal(size=x.shape) * 0.3).float())
  model.save_pretrained(out)
  tokens = rng.integers(1, SIZES["vocab_size"], (3, 12))
  tokens *= np.arange(12) < np.array([[12], [5], [8]])
  tensor = torch.from_numpy(tokens)
  with torch.no_grad():
    logits = model(tensor, attention_mask=(tensor != 0).long()).logits
  np.savez_compressed(
    out / "reference.npz", tokens=tokens.astype(np.int32), logits=logits.numpy()
  )


def write(golden):
  for name, (kind, num_labels) in FOLDERS.items():
    out = pathlib.Path(golden) / "classifiers" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_folder(kind, num_labels, out)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
