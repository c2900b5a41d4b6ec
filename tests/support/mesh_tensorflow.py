"""Checkpoints of Mesh TensorFlow's T5: names, shapes, and slots of Adafactor.

The names and shapes are those of testdata/mtf_tiny_t5 in google-research/t5x;
the arithmetic is AdafactorOptimizer's in tensorflow/mesh, optimize.py.
"""

import re

import numpy as np

_DECAY, _EPSILON1, _EPSILON2 = 0.8, 1e-30, 1e-3


def write(prefix, arrays, step):
  """Writes what tf.train.Saver would."""
  import tensorflow as tf

  arrays = {**arrays, "global_step": np.int64(step)}
  names, values = zip(*sorted(arrays.items()))
  tf.raw_ops.SaveV2(
    prefix=str(prefix),
    tensor_names=names,
    shape_and_slices=[""] * len(names),
    tensors=[tf.constant(value) for value in values],
  )


def shapes(*, vocab_size, width, num_heads, head_dim, mlp_dim, **_):
  """{name: shape} of the variables of T5 1.1 with a block in each stack."""
  heads = num_heads * head_dim
  result = {
    "shared/embedding": (vocab_size, width),
    "decoder/logits/kernel": (width, vocab_size),
  }
  layers = dict(
    encoder=("SelfAttention", "DenseReluDense"),
    decoder=("SelfAttention", "EncDecAttention", "DenseReluDense"),
  )
  for stack, names in layers.items():
    result[f"{stack}/rms_norm/scale"] = (width,)
    first = f"{stack}/block_000/layer_000/SelfAttention"
    result[f"{first}/relative_attention_bias"] = (num_heads, 32)
    for i, layer in enumerate(names):
      path = f"{stack}/block_000/layer_{i:03}"
      result[f"{path}/rms_norm/scale"] = (width,)
      if layer == "DenseReluDense":
        ends = ("wi_0/kernel", "wi_1/kernel", "wo/kernel")
        dims = [(width, mlp_dim)] * 2 + [(mlp_dim, width)]
      else:
        ends = "qkvo"
        dims = [(width, heads)] * 3 + [(heads, width)]
      result |= {f"{path}/{layer}/{end}": x for end, x in zip(ends, dims)}
  return result


def name_of(published):
  """The name of an array of transformers' T5."""
  number = lambda match: f"{match[1]}_{int(match[2]):03}"
  name = re.sub(r"(block|layer)\.(\d+)", number, published)
  name = name.replace("shared.weight", "shared.embedding")
  name = name.replace("lm_head.weight", "decoder.logits.kernel")
  name = re.sub(r"norm\.weight$", "norm.scale", name)
  name = re.sub(r"\.(w[io](_\d)?)\.weight$", r".\1.kernel", name)
  return name.removesuffix(".weight").replace(".", "/")


def from_published(arrays):
  return {
    name_of(name): x if "shared" in name else x.T for name, x in arrays.items()
  }


def later_names(arrays):
  """The names of norms in later versions."""
  return {
    re.sub(r"(final_)?layer_norm", "rms_norm", n): arrays[n] for n in arrays
  }


def factored_dims(shape, least):
  dims = sorted(range(len(shape)), key=lambda d: -shape[d])[:2]
  return dims if len(dims) == 2 and shape[dims[1]] >= least else None


def slots(name, square, least):
  """The slots of a variable after gradients with these mean squares."""
  dims = factored_dims(square.shape, least)
  if not dims:
    return {f"{name}_slot_v": square}
  return {
    f"{name}_slot_{kind}": square.mean(axis=d)
    for kind, d in zip(("vr", "vc"), dims)
  }


def next_value(name, arrays, grad, step, lr, least):
  """A variable after a step of Adafactor."""
  rms = lambda x: np.sqrt(np.mean(np.square(x)))
  rate = 1 - (step + 1.0) ** -_DECAY
  square = np.square(grad) + _EPSILON1
  new = {
    slot: rate * arrays[slot] + (1 - rate) * mean
    for slot, mean in slots(name, square, least).items()
  }
  if dims := factored_dims(grad.shape, least):
    rows, columns = (np.expand_dims(x, d) for x, d in zip(new.values(), dims))
    rows = rows / rows.mean(axis=dims[1], keepdims=True)
    update = grad / np.sqrt(rows) / np.sqrt(columns)
  else:
    (moment,) = new.values()
    update = grad / np.sqrt(moment)
  update = update / max(1.0, rms(update))
  value = arrays[name]
  return value - update * lr * max(rms(value), _EPSILON2)
