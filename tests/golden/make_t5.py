"""Makes hf_t5, hf_t5_1_1, hf_switch: small random models of transformers.

  python tests/golden/make_t5.py   # requirements.txt has the versions

A folder is the output of save_pretrained plus golden.npz: inputs and targets,
longer than relative_attention_max_distance, and logits. Experts have capacity
for all tokens. Run it again only after an intended change of the model, and
explain the change in the commit.
"""

import pathlib

import numpy as np
import torch
import transformers

SIZES = dict(
  vocab_size=30,
  d_model=12,
  d_kv=5,
  d_ff=24,
  num_heads=3,
  relative_attention_num_buckets=8,
  relative_attention_max_distance=20,
  dropout_rate=0.0,
)
DEPTHS = dict(num_layers=2, num_decoder_layers=3)
EXPERTS = dict(
  num_layers=4,
  num_sparse_encoder_layers=2,
  num_decoder_layers=2,
  num_sparse_decoder_layers=1,
  num_experts=4,
  expert_capacity=64,
)
INPUT_LENGTHS = (28, 17)


def models():
  """Yields (name, model) with the special features of each layout."""
  t5, switch = (
    transformers.T5ForConditionalGeneration,
    transformers.SwitchTransformersForConditionalGeneration,
  )
  v1_0 = dict(feed_forward_proj="relu", tie_word_embeddings=True)
  v1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
  for name, kind, options in (
    ("t5", t5, DEPTHS | v1_0),
    ("t5_1_1", t5, DEPTHS | v1_1),
    ("switch", switch, EXPERTS),
  ):
    torch.manual_seed(0)
    yield name, kind(kind.config_class(**SIZES, **options)).eval()


def make(name, model, folder):
  """Writes a model's folder with golden.npz."""
  with torch.no_grad():
    if name == "t5_1_1":  # transformers 5 ties the heads of all new models.
      head = torch.randn(model.lm_head.weight.shape)
      model.lm_head.weight = torch.nn.Parameter(head)
    for parameter, value in model.named_parameters():
      # Initial norms, routers and position biases would hide mistakes.
      if "norm" in parameter:
        value += 0.3 * torch.randn(value.shape)
      elif "relative" in parameter or "router" in parameter:
        value += torch.randn(value.shape)
  model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  inputs = torch.randint(1, 30, (2, max(INPUT_LENGTHS)))
  for row, length in zip(inputs, INPUT_LENGTHS):
    row[length:] = 0
  targets = torch.randint(1, 30, (2, 25))
  with torch.no_grad():
    logits = model(
      input_ids=inputs,
      attention_mask=(inputs != 0).long(),
      decoder_input_ids=torch.nn.functional.pad(targets[:, :-1], (1, 0)),
    ).logits
  arrays = dict(inputs=inputs, targets=targets, logits=logits)
  arrays = {name: value.numpy() for name, value in arrays.items()}
  np.savez_compressed(folder / "golden.npz", **arrays)


def write(golden):
  """Writes all folders below `golden`."""
  for name, model in models():
    make(name, model, golden / f"hf_{name}")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
