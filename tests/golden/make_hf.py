"""Makes hf_gpt2, hf_llama, hf_mixtral: small random models of transformers.

Names, layouts and computation are the library's. The parameters are random, so
the folders contain no published weights. A folder is the output of
save_pretrained plus golden.npz, tokens and their logits.

  python tests/golden/make_hf.py   # requirements.txt has the versions
"""

import pathlib

import numpy as np
import torch
import transformers

LENGTH = 40


def configs():
  """Returns small configs with the special features of each layout."""
  gpt2 = transformers.GPT2Config(
    vocab_size=61,
    n_positions=48,
    n_embd=24,
    n_layer=2,
    n_head=3,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
  )
  sizes = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
  )
  llama = transformers.LlamaConfig(
    **sizes,
    head_dim=8,
    rope_parameters=dict(
      rope_type="llama3",
      rope_theta=10_000.0,
      factor=4.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
  )
  mixtral = transformers.MixtralConfig(
    **sizes,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
    sliding_window=None,
  )
  return {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def make(name, config, out):
  """Writes a model's folder with golden.npz."""
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  ).float()
  rng = np.random.default_rng(0)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = rng.normal(size=parameter.shape).astype(np.float32)
      # Initial scales and biases are all equal and would hide a wrong name.
      parameter.add_(torch.from_numpy(noise) * (0.2 if noise.ndim > 1 else 0.3))
  model.save_pretrained(out)
  (out / "generation_config.json").unlink(missing_ok=True)
  tokens = rng.integers(0, config.vocab_size, (2, LENGTH))
  with torch.no_grad():
    logits = model.eval()(torch.from_numpy(tokens)).logits.numpy()
  np.savez_compressed(out / "golden.npz", tokens=tokens, logits=logits)


def write(golden):
  """Writes all folders below `golden`."""
  for name, config in configs().items():
    make(name, config, golden / f"hf_{name}")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
