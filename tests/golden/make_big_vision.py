"""Makes big_vision.json: outputs of big_vision's own Mixer, BiT and BERT.

The parameters are drawn by `drawn`, from their names and shapes, which the file
has as well. Needs clones of google-research/big_vision and google/flaxformer:

  PYTHONPATH=BIG_VISION:FLAXFORMER python tests/golden/make_big_vision.py
"""

import json
import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_name("big_vision.json")
TEXT = np.array([[5, 7, 9, 2, 0, 0], [3, 1, 4, 1, 5, 2]])


def drawn(shapes):
  """Parameters by name, in float32."""
  rng = np.random.default_rng(0)
  values = {}
  for name, shape in sorted(shapes.items()):
    fan_in = np.prod(shape[:-1]) if name.endswith("/kernel") else 10
    values[name] = rng.normal(size=shape) * max(fan_in, 1) ** -0.5
    values[name] += name.endswith("/scale")
  return {name: x.astype(np.float32) for name, x in values.items()}


def image():
  return np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype("f")


def models():
  from big_vision.models import bit, bit_paper, mlp_mixer

  mixer = dict(variant="B/8", num_blocks=2, hidden_dim=8)
  mixer |= dict(tokens_mlp_dim=6, channels_mlp_dim=10)
  return {
    "mixer": (mlp_mixer.Model(5, **mixer), image()),
    "bit": (bit.Model(5, width=0.5, depth=(1, 1)), image()),
    "bit_paper": (bit_paper.Model(5, width=0.5, depth=(1, 1)), image()),
    "bert": (Bert(), TEXT),
  }


def Bert():
  """big_vision's wrapper has two sizes only, and wants TensorFlow's files."""
  import flax.linen as nn
  import jax.numpy as jnp
  from flaxformer.architectures.bert import bert

  class Model(nn.Module):
    @nn.compact
    def __call__(self, text):
      sizes = dict(hidden_size=8, intermediate_dim=12, vocab_size=11)
      sizes |= dict(max_length=9, num_segments=2, num_hidden_layers=2)
      encoded = bert.BertEncoder(**sizes, num_attention_heads=2)(
        token_ids=jnp.asarray(text),
        position_ids=jnp.tile(jnp.arange(text.shape[1]), [len(text), 1]),
        segment_ids=jnp.zeros_like(text),
        input_mask=jnp.asarray(text != 0, jnp.int32),
        enable_dropout=False,
      )
      return nn.Dense(5, name="head")(encoded[:, 0]), None

  return Model()


def main():
  import jax
  from flax.traverse_util import flatten_dict, unflatten_dict

  result = {}
  for name, (model, x) in models().items():
    init = lambda key, model=model, x=x: model.init(key, x)
    params = jax.eval_shape(init, jax.random.key(0))["params"]
    flat = flatten_dict(params, sep="/")
    shapes = {key: list(leaf.shape) for key, leaf in flat.items()}
    values = unflatten_dict(drawn(shapes), sep="/")
    with jax.default_matmul_precision("highest"):
      logits, _ = model.apply({"params": values}, x)
    result[name] = dict(shapes=shapes, logits=np.asarray(logits).tolist())
  FILE.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
  main()
