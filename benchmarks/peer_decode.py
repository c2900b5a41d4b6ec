"""Greedy decoding by transformers, for peer_process.py.

It also writes the model, a Llama with random weights, as the folder that both
sides load. The cache has a fixed size, with which transformers compiles its
step on a GPU.
"""

import json
import os
import random
import sys
import time
from typing import Any

from benchmarks import peer_process

_DONE = "complete"


def prompts(options: dict[str, Any]) -> list[list[int]]:
  """Returns random tokens [B, L] for batch_size, length and vocab_size."""
  draw = random.Random(0)
  vocab_size, length = options["model"]["vocab_size"], options["length"]
  return [
    [draw.randrange(1, vocab_size) for _ in range(length)]
    for _ in range(options["batch_size"])
  ]


def wait_for(folder: str) -> None:
  """Waits until the peer has written the folder."""
  while not os.path.exists(os.path.join(folder, _DONE)):
    time.sleep(0.1)


def main() -> None:
  """Writes the model of the options on the command line, and serves it."""
  import torch
  import transformers

  from benchmarks import peer_torch_step

  options = json.loads(sys.argv[1])
  sizes, folder = options["model"], options["folder"]
  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    hidden_size=sizes["width"],
    num_hidden_layers=sizes["depth"],
    num_attention_heads=sizes["num_heads"],
    num_key_value_heads=sizes["num_kv_heads"],
    intermediate_size=sizes["mlp_dim"],
    vocab_size=sizes["vocab_size"],
    tie_word_embeddings=True,
    # Nothing ends a text, so that all have the same length.
    bos_token_id=None,
    eos_token_id=None,
    dtype="bfloat16",
  )
  with torch.device(device):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
  model.save_pretrained(folder)
  with open(os.path.join(folder, _DONE), "w"):
    pass
  tokens_BL = torch.tensor(prompts(options), device=device)

  def run(max_new: int) -> dict[str, float]:
    start_secs = time.perf_counter()
    with torch.no_grad():
      out_BL = model.generate(
        tokens_BL,
        attention_mask=torch.ones_like(tokens_BL),
        max_new_tokens=max_new,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
      )
    out_BL = out_BL.cpu()  # Waits for the device.
    assert out_BL.shape[1] == tokens_BL.shape[1] + max_new
    return {"secs": time.perf_counter() - start_secs}

  run(options["max_new"])
  peer_process.serve({"platform": peer_torch_step.platform()}, run)


if __name__ == "__main__":
  main()
