"""Opens exported folders with new tokens as their users do, with transformers.

  python tests/golden/open_tokens.py TEXT FOLDER...

Writes opened.npz into each FOLDER: the ids of the text by AutoTokenizer, what
they decode to without special tokens, and their logits.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

if __name__ == "__main__":
  text, *folders = sys.argv[1:]
  for path in map(pathlib.Path, folders):
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
      path, output_loading_info=True, dtype=torch.float32
    )
    if any(info.values()):
      raise SystemExit(f"{path}: {info}")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
      logits = model.eval()(torch.tensor([ids])).logits.numpy()
    np.savez(
      path / "opened.npz",
      ids=np.array(ids),
      text=tokenizer.decode(ids, skip_special_tokens=True),
      size=len(tokenizer),
      tied=tied,
      logits=logits,
    )
