"""Makes published_lengths/: what models generate whose rotation knows lengths.

Each folder has a small random model as transformers writes it, and
reference.npz: prompts of several lengths, padded with -1, and the tokens that
greedy generation adds to each of them alone. Texts grow beyond the length above
which LongRoPE has other frequencies, and "dynamic" embeddings new ones with
each token.

  python tests/golden/make_lengths.py   # writes the folders anew
"""

import pathlib
import shutil

import make_published
import numpy as np
import torch
import transformers

# The frequencies change after this many tokens.
LENGTH = 12
LENGTHS, NEW = (3, 8, 11, 12, 13, 20), 16
MODELS = {
  "phi3": make_published.PHI3
  | make_published.longrope(LENGTH)
  | dict(hidden_size=32, sliding_window=None),
  # Layers with a window keep only its keys and values.
  "phi3_window": make_published.PHI3 | make_published.longrope(LENGTH),
  "llama_dynamic": dict(
    model_type="llama",
    num_hidden_layers=2,
    rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    max_position_embeddings=LENGTH,
  ),
}


def write_model(options, out):
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  no_tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
  sizes = make_published.SIZES | no_tokens | options
  config = transformers.AutoConfig.for_model(**sizes)
  make = transformers.AutoModelForCausalLM.from_config
  model = make(config, dtype=torch.float32, **make_published.EAGER).eval()
  make_published.with_noise(model, rng)
  model.save_pretrained(out)
  (out / "generation_config.json").unlink(missing_ok=True)
  shape = len(LENGTHS), max(LENGTHS)
  prompts, generated = np.full(shape, -1, np.int32), []
  for row, length in zip(prompts, LENGTHS):
    row[:length] = rng.integers(0, config.vocab_size, length)
    # A new model: "dynamic" frequencies stay as the last text left them.
    model = transformers.AutoModelForCausalLM.from_pretrained(
      out, dtype=torch.float32, **make_published.EAGER
    ).eval()
    prompt = torch.from_numpy(row[None, :length]).long()
    with torch.no_grad():
      text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
      )
    generated.append(text[0, length:].numpy())
  np.savez_compressed(
    out / "reference.npz",
    prompt=prompts,
    generated=np.stack(generated).astype(np.int32),
  )


def write(golden):
  """Writes all folders below `golden`."""
  folder = golden / "published_lengths"
  shutil.rmtree(folder, ignore_errors=True)
  for name, options in MODELS.items():
    out = folder / name
    out.mkdir(parents=True)
    write_model(options, out)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
