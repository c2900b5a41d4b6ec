"""Makes rope.json: frequencies of scaled rotary embeddings by transformers.

python tests/golden/make_rope.py   # requirements.txt has the versions
"""

import json
import pathlib

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Our rope_scaling's keys in transformers' terms.
NAMES = dict(type="rope_type", original_len="original_max_position_embeddings")
SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [1.0, 2.5, 8.0, 24.0]
CASES = [
  dict(scaling=dict(type="linear", factor=8.0), theta=1e6, head_dim=16),
  dict(
    scaling=dict(
      type="llama3",
      factor=32.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_len=8192,
    ),
    theta=5e5,
    head_dim=64,
  ),
  # gpt-oss.
  dict(
    scaling=dict(
      type="yarn",
      factor=32.0,
      original_len=4096,
      beta_fast=32.0,
      beta_slow=1.0,
      truncate=False,
    ),
    theta=150_000.0,
    head_dim=64,
  ),
  # Qwen3's and Olmo 3's have few keys, DeepSeek's many.
  dict(
    scaling=dict(type="yarn", factor=4.0, original_len=32_768),
    theta=1e6,
    head_dim=128,
  ),
  dict(
    scaling=dict(
      type="yarn",
      factor=8.0,
      original_len=8192,
      beta_fast=16.0,
      beta_slow=2.0,
      attention_factor=1.2,
    ),
    theta=5e5,
    head_dim=32,
    fraction=0.5,
  ),
  dict(
    scaling=dict(
      type="yarn",
      factor=40.0,
      original_len=4096,
      mscale=0.707,
      mscale_all_dim=1.0,
    ),
    theta=1e4,
    head_dim=64,
  ),
  dict(
    scaling=dict(type="dynamic", factor=6.0, original_len=131_072),
    theta=1e4,
    head_dim=12,
  ),
  # A range of a single pair.
  dict(
    scaling=dict(type="yarn", factor=4.0, original_len=16),
    theta=1e4,
    head_dim=8,
  ),
  *[
    dict(
      scaling=dict(
        type="longrope",
        short_factor=SHORT,
        long_factor=LONG,
        original_len=4096,
        **others,
      ),
      theta=1e4,
      head_dim=head_dim,
      fraction=fraction,
      max_len=131_072,
    )
    for others, head_dim, fraction in (
      ({}, 8, 1.0),
      (dict(factor=8.0), 16, 0.5),
      (dict(attention_factor=1.5), 8, 1.0),
    )
  ],
]


def main():
  for case in CASES:
    scaling = {NAMES.get(n, n): x for n, x in case["scaling"].items()}
    fraction = case.get("fraction", 1.0)
    parameters = scaling | dict(
      rope_theta=case["theta"], partial_rotary_factor=fraction
    )
    config = transformers.LlamaConfig(
      head_dim=case["head_dim"],
      max_position_embeddings=case.get("max_len", 131_072),
      rope_parameters=parameters,
    )
    compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    omega, case["magnitude"] = compute(config, "cpu")
    case["frequencies"] = omega.tolist()
    long, _ = compute(config, "cpu", seq_len=200_000)
    case["long_frequencies"] = long.tolist()
  path = pathlib.Path(__file__).with_name("rope.json")
  path.write_text(json.dumps(CASES) + "\n")


if __name__ == "__main__":
  main()
