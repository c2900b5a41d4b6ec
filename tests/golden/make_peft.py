"""Makes peft/: adapters of small models as PEFT writes and computes them.

Each folder has the adapter, with random factors, and reference.npz: tokens,
logits with the adapter, and gradients of the mean cross-entropy by the names in
the file. base_<family> has the models. requirements.txt has the versions.

  python tests/golden/make_peft.py   # writes the folders anew
"""

import json
import pathlib

import numpy as np
import peft
import torch
import transformers

BATCH, LENGTH = 2, 12
LLAMA = transformers.LlamaConfig(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  tie_word_embeddings=False,
  attn_implementation="eager",
)
GPT2 = transformers.GPT2Config(
  vocab_size=67,
  n_embd=16,
  n_layer=2,
  n_head=4,
  n_positions=64,
  resid_pdrop=0.0,
  embd_pdrop=0.0,
  attn_pdrop=0.0,
  attn_implementation="eager",
)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
ALL += ["down_proj", "lm_head"]
CASES = {
  "lora": (LLAMA, dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])),
  "rslora": (
    LLAMA,
    dict(
      r=4,
      lora_alpha=6,
      use_rslora=True,
      target_modules=ALL,
      rank_pattern={"o_proj": 2},
      alpha_pattern={"o_proj": 5, "model.layers.1.self_attn.q_proj": 3},
    ),
  ),
  "dora": (LLAMA, dict(r=3, lora_alpha=6, use_dora=True, target_modules=ALL)),
  "gpt2": (
    GPT2,
    dict(r=4, lora_alpha=8, fan_in_fan_out=True, target_modules=["c_attn"]),
  ),
}


def _family(config):
  return "llama" if config is LLAMA else "gpt2"


def write(golden):
  folder = pathlib.Path(golden) / "peft"
  for config in (LLAMA, GPT2):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
      for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.08 + (1.0 if p.ndim == 1 else 0.0))
    model.save_pretrained(folder / f"base_{_family(config)}")
  for name, (config, options) in CASES.items():
    _write_case(folder, name, config, options)


def _write_case(folder, name, config, options):
  base = folder / f"base_{_family(config)}"
  model = transformers.AutoModelForCausalLM.from_pretrained(
    base, attn_implementation="eager"
  )
  lora = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options)
  model = peft.get_peft_model(model, lora)
  torch.manual_seed(1)
  with torch.no_grad():
    for key, p in model.named_parameters():
      if "lora_magnitude" in key:
        p.mul_(1 + 0.3 * torch.rand_like(p))
      elif "lora_" in key:
        p.copy_(0.1 * torch.randn_like(p))
  model.save_pretrained(folder / name, save_embedding_layers=False)
  (folder / name / "README.md").unlink()
  path = folder / name / "adapter_config.json"
  config_json = json.loads(path.read_text().replace(str(folder), ".."))
  config_json["target_modules"].sort()  # A set.
  path.write_text(json.dumps(config_json, indent=2) + "\n")
  tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1))
  logits = model(input_ids=tokens[:, :-1]).logits
  loss = torch.nn.functional.cross_entropy(
    logits.flatten(0, 1), tokens[:, 1:].flatten()
  )
  loss.backward()
  grads = {
    "grad/" + key.replace(".default", ""): p.grad.numpy()
    for key, p in model.named_parameters()
    if p.grad is not None
  }
  np.savez(
    folder / name / "reference.npz",
    tokens=tokens.numpy(),
    logits=logits.detach().numpy(),
    loss=loss.item(),
    **grads,
  )


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
