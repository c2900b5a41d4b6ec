"""Makes t5.npz: logits of small random T5s by transformers, for models/t5.py.

  pip install torch transformers    # 2.13 and 5.23 made the file
  python tests/golden/make_t5.py

Versions 1.0 and 1.1, in float32, with inputs and targets longer than the
largest distance that the models tell apart. Run it again only when the model is
meant to compute something else, and say in the commit what and why.
"""

import pathlib

import numpy as np
import torch
import transformers

FILE = pathlib.Path(__file__).with_name("t5.npz")
SIZES = dict(
  vocab_size=30,
  d_model=12,
  d_kv=5,
  d_ff=20,
  num_layers=2,
  num_decoder_layers=3,
  num_heads=3,
  relative_attention_num_buckets=8,
  relative_attention_max_distance=20,
  dropout_rate=0.0,
)
CASES = {
  "t5": dict(feed_forward_proj="relu", tie_word_embeddings=True),
  "t5_1_1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
INPUT_LENGTHS = (28, 17)


def make() -> dict[str, np.ndarray]:
  """Parameters, inputs, targets and logits by "<case>/<name>"."""
  found: dict[str, np.ndarray] = {}
  for seed, (case, options) in enumerate(CASES.items()):
    torch.manual_seed(seed)
    config = transformers.T5Config(**SIZES, **options)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
      if case == "t5_1_1":  # transformers 5 ties the head of all new models.
        head = torch.randn(model.lm_head.weight.shape)
        model.lm_head.weight = torch.nn.Parameter(head)
      for name, value in model.named_parameters():
        # The initial norms and biases of positions would hide mistakes.
        if "norm" in name:
          value += 0.3 * torch.randn(value.shape)
        elif "relative" in name:
          value += torch.randn(value.shape)
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
    weights = {f"params/{n}": p for n, p in model.named_parameters()}
    arrays = dict(inputs=inputs, targets=targets, logits=logits, **weights)
    for name, value in arrays.items():
      found[f"{case}/{name}"] = value.detach().numpy()
  return found


if __name__ == "__main__":
  np.savez_compressed(FILE, **make())
