"""Steps of a Llama or a SmolVLM with PEFT's LoRA, for peer_process.py.

As its users train: transformers' model and loss, scaled_dot_product_attention,
AdamW of the adapters, fused; torch.compile if the options say so.
"""

import json
import sys
import time
from typing import Any

import peft
import torch
import transformers

from benchmarks import peer_process, peer_torch_step, synthetic_pictures


def _llama(options: dict[str, Any]) -> Any:
  sizes = options["model"]
  config = transformers.LlamaConfig(
    hidden_size=sizes["width"],
    num_hidden_layers=sizes["depth"],
    num_attention_heads=sizes["num_heads"],
    num_key_value_heads=sizes["num_kv_heads"],
    intermediate_size=sizes["mlp_dim"],
    vocab_size=sizes["vocab_size"],
    max_position_embeddings=options["length"],
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
    tie_word_embeddings=True,
    use_cache=False,
    attn_implementation="sdpa",
  )
  return transformers.LlamaForCausalLM(config)


def _smolvlm(options: dict[str, Any]) -> Any:
  config = transformers.AutoConfig.from_pretrained(options["folder"])
  config._attn_implementation = "sdpa"
  config.text_config.use_cache = False
  return transformers.SmolVLMForConditionalGeneration(config)


def main() -> None:
  """Builds the model of the options on the command line, and serves it."""
  options = json.loads(sys.argv[1])
  sizes, length = options["model"], options["length"]
  torch.manual_seed(0)
  rank = options["rank"]
  has_pictures = "folder" in options
  # The second ones are those of SmolVLM's recipe; of its tower, they are the
  # queries, keys and values.
  targets: Any = "all-linear"
  if has_pictures:
    targets = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
  lora = peft.LoraConfig(
    r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0,
    task_type="CAUSAL_LM",
  )  # fmt: skip
  device = "cuda" if torch.cuda.is_available() else "cpu"
  dtype = getattr(torch, options.get("dtype", "float32"))
  with torch.device(device):
    base = _smolvlm(options) if has_pictures else _llama(options)
    base = base.to(dtype)
  model = peft.get_peft_model(base, lora)
  model.train()
  trained = [x for x in model.parameters() if x.requires_grad]
  adam = torch.optim.AdamW(trained, 1e-4, weight_decay=0.0, fused=True)
  run_model = torch.compile(model) if options["compiled"] else model
  # One more token: the model predicts each from those before.
  shape = (options["batch_size"], length + 1)
  tokens = torch.randint(sizes["vocab_size"] - 1, shape).to(device)
  inputs = {"input_ids": tokens, "labels": tokens}
  if has_pictures:
    side = sizes["image_size"]
    number = synthetic_pictures.image_tokens(side)
    tokens[:, :number] = sizes["vocab_size"] - 1
    shape = (options["batch_size"], 1, 3, side, side)
    inputs["pixel_values"] = torch.randn(shape, dtype=dtype).to(device)

  def run(steps: int) -> tuple[float, float]:
    peer_torch_step.wait(device)
    start_secs, start_cpu_secs = time.perf_counter(), time.process_time()
    for _ in range(steps):
      adam.zero_grad()
      run_model(**inputs).loss.backward()
      torch.nn.utils.clip_grad_norm_(trained, 1.0)
      adam.step()
    peer_torch_step.wait(device)
    cpu_secs = time.process_time() - start_cpu_secs
    return time.perf_counter() - start_secs, cpu_secs

  peer_torch_step.with_memory(lambda: run(1))
  number = sum(x.numel() for x in trained)
  platform = peer_torch_step.platform()
  peer_process.serve({"parameters": number, "platform": platform}, run)


if __name__ == "__main__":
  main()
