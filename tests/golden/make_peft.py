"""Makes peft/: adapters of small models as PEFT writes and computes them.

Each folder has the adapter, with random factors, and reference.npz: tokens,
logits with the adapter, and gradients of the mean cross-entropy by the names in
the file. The models are in base_<family> and, of other families, published/.
requirements.txt has the versions.

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
# With plain rotary embeddings, it is a Llama but for the names of its arrays.
PHI3 = transformers.Phi3Config(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  tie_word_embeddings=False,
  pad_token_id=0,
  attn_implementation="eager",
)
BASES = {"base_llama": LLAMA, "base_gpt2": GPT2, "base_phi3": PHI3}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# {case: (base, options of LoraConfig)}.
CASES = {
  "lora": (
    "base_llama",
    dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
  ),
  "rslora": (
    "base_llama",
    dict(
      r=4,
      lora_alpha=6,
      use_rslora=True,
      target_modules=ALL,
      rank_pattern={"o_proj": 2},
      alpha_pattern={"o_proj": 5, "model.layers.1.self_attn.q_proj": 3},
    ),
  ),
  "dora": (
    "base_llama",
    dict(r=3, lora_alpha=6, use_dora=True, target_modules=ALL),
  ),
  "gpt2": (
    "base_gpt2",
    dict(r=4, lora_alpha=8, fan_in_fan_out=True, target_modules=["c_attn"]),
  ),
  # Modules that join several projections.
  "phi3": ("base_phi3", dict(target_modules=["qkv_proj", "gate_up_proj"])),
  "phi3_dora": (
    "base_phi3",
    dict(use_dora=True, target_modules=["qkv_proj", "down_proj"]),
  ),
  # Biases.
  "glm4": (
    "published/glm4",
    dict(bias="lora_only", target_modules=["gate_up_proj", "q_proj"]),
  ),
  "all_biases": (
    "base_gpt2",
    dict(bias="all", fan_in_fan_out=True, target_modules=["c_attn", "c_fc"]),
  ),
  "lora_bias": (
    "published/granite",
    dict(lora_bias=True, target_modules=["q_proj", "down_proj", "lm_head"]),
  ),
  "lora_bias_phi3": (
    "base_phi3",
    dict(lora_bias=True, use_rslora=True, target_modules=["qkv_proj"]),
  ),
  # Embeddings and heads, the same array or not.
  "embedding": ("base_llama", dict(target_modules=["embed_tokens", "v_proj"])),
  "embedding_dora": (
    "base_llama",
    dict(use_dora=True, target_modules=["embed_tokens", "v_proj"]),
  ),
  "tied_embedding": (
    "published/gemma",
    dict(target_modules=["embed_tokens", "v_proj"]),
  ),
  "tied_gpt2": (
    "base_gpt2",
    dict(fan_in_fan_out=True, target_modules=["wte", "c_attn"]),
  ),
  "tied_head": ("published/qwen3", dict(target_modules=["lm_head", "v_proj"])),
  "tied_both": (
    "published/qwen3",
    dict(ensure_weight_tying=True, target_modules=["embed_tokens", "v_proj"]),
  ),
  "saved": (
    "base_llama",
    dict(
      target_modules=["v_proj"],
      modules_to_save=["embed_tokens", "lm_head", "model.norm", "layers.1.mlp"],
    ),
  ),
  "tied_saved_head": (
    "published/qwen3",
    dict(target_modules=["v_proj"], modules_to_save=["lm_head"]),
  ),
  "tied_saved_embedding": (
    "published/qwen3",
    dict(target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
  ),
  "tied_saved_both": (
    "published/qwen3",
    dict(
      ensure_weight_tying=True,
      target_modules=["v_proj"],
      modules_to_save=["embed_tokens"],
    ),
  ),
  "tokens": (
    "base_llama",
    dict(
      target_modules=["v_proj"],
      trainable_token_indices={"embed_tokens": [3, 7, 66], "lm_head": [5]},
    ),
  ),
  "tied_tokens": (
    "published/qwen3",
    dict(target_modules=["v_proj"], trainable_token_indices=[7, 3]),
  ),
  "classes": (
    "base_llama",
    dict(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]),
  ),
  # Experts, which are parameters.
  "mixtral": (
    "published/mixtral",
    dict(
      target_modules=["v_proj"],
      target_parameters=[GATE_UP, DOWN, "mlp.gate.weight"],
    ),
  ),
  "qwen3_moe": (
    "published/qwen3_moe",
    dict(target_modules=[], target_parameters=[GATE_UP]),
  ),
  "granitemoe": (
    "published/granitemoe",
    dict(
      target_modules=["v_proj"],
      target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    ),
  ),
  "gpt_oss": (
    "published/gpt_oss",
    dict(
      bias="lora_only",
      target_modules=["v_proj"],
      target_parameters=[GATE_UP, DOWN, "mlp.router.weight"],
    ),
  ),
}


def write(golden):
  folder = pathlib.Path(golden) / "peft"
  for name, config in BASES.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
      for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.08 + (1.0 if p.ndim == 1 else 0.0))
    model.save_pretrained(folder / name)
  for name, (base, options) in CASES.items():
    _write_case(folder, name, base, options)


def _write_case(folder, name, base, options):
  is_published = base.startswith("published/")
  parent = pathlib.Path(__file__).parent if is_published else folder
  options = dict(r=2, lora_alpha=5, task_type="CAUSAL_LM") | options
  classifies = options["task_type"] == "SEQ_CLS"
  kind = transformers.AutoModelForCausalLM
  if classifies:
    kind = transformers.AutoModelForSequenceClassification
  torch.manual_seed(1)  # For a new head.
  model = kind.from_pretrained(
    parent / base,
    attn_implementation="eager",
    experts_implementation="eager",
    dtype=torch.float32,
    **(dict(num_labels=3) if classifies else {}),
  )
  if classifies:  # The library reads the last token that is not this one.
    model.config.pad_token_id = -1
  lora = peft.LoraConfig(lora_dropout=0.0, **options)
  model = peft.get_peft_model(model, lora)
  torch.manual_seed(1)
  with torch.no_grad():
    for key, p in model.named_parameters():
      if "lora_magnitude" in key:
        p.mul_(1 + 0.3 * torch.rand_like(p))
      elif "lora_" in key:
        p.copy_(0.1 * torch.randn_like(p))
      elif p.requires_grad:
        p.add_(0.1 * torch.randn_like(p))
  embedded = any(
    x in options["target_modules"] for x in ("embed_tokens", "wte")
  )
  save = "auto" if embedded else False
  model.save_pretrained(folder / name, save_embedding_layers=save)
  (folder / name / "README.md").unlink()
  path = folder / name / "adapter_config.json"
  text = path.read_text().replace(str(folder), "..")
  text = text.replace(str(pathlib.Path(__file__).parent), "../..")
  config_json = json.loads(text)
  for key in ("target_modules", "target_parameters", "modules_to_save"):
    config_json[key] = config_json[key] and sorted(config_json[key])  # Sets.
  path.write_text(json.dumps(config_json, indent=2) + "\n")
  tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH + 1))
  logits = model(input_ids=tokens[:, :-1]).logits
  if classifies:
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2]))
  else:
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
