"""Makes two_towers.npz: expected embeddings and losses, in plain numpy.

  PYTHONPATH=tests python -m golden.make_two_towers

Tests models/two_towers.py and tasks/contrastive.py. Uses the image tower of
make_vit.py. Like it, computes in float64, one text, head and pair at a time,
and shares no code with the model. Run it again only after an intended change of
the model, and explain the change in the commit.
"""

import math
import pathlib

import numpy as np
from golden import make_vit

FILE = pathlib.Path(__file__).with_name("two_towers.npz")

# Both towers have the sizes of make_vit.SIZES.
VOCAB, TEXT_LEN = 11, 5
CASES = {
  "siglip": dict(
    image=dict(pool_type="map"), text=dict(pool_type="last"), dims=(None, 16)
  ),
  "head": dict(
    image=dict(pool_type="gap"), text=dict(pool_type="map"), dims=(7, 7)
  ),
}
# The logarithm of the scale, and the bias.
T, B = 1.5, -2.0


def make() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns (inputs, outputs), named "<case>/params/<name>" and so on."""
  inputs, outputs = {}, {}
  for seed, (case, options) in enumerate(CASES.items()):
    rng = np.random.RandomState(200 + seed)
    image_options = {**options["image"], "num_classes": options["dims"][0]}
    text_options = {**options["text"], "num_classes": options["dims"][1]}
    shapes = {f"img/{n}": s for n, s in make_vit.shapes(image_options).items()}
    shapes |= {f"txt/{n}": s for n, s in text_shapes(text_options).items()}
    params = {n: make_vit.draw(rng, n, s) for n, s in shapes.items()}
    params |= {"t": np.array([T]), "b": np.array([B])}
    images = rng.uniform(-1, 1, make_vit.IMAGE_SHAPE)
    texts = rng.randint(0, VOCAB, (len(images), TEXT_LEN))
    inputs.update({f"{case}/params/{n}": p for n, p in params.items()})
    inputs |= {f"{case}/image": images, f"{case}/text": texts}

    tower = {n[4:]: p for n, p in params.items() if n.startswith("img/")}
    image_z = [
      on_sphere(make_vit.forward(tower, image, image_options)["logits"])
      for image in images
    ]
    tower = {n[4:]: p for n, p in params.items() if n.startswith("txt/")}
    text_z = [on_sphere(encode(tower, text, text_options)) for text in texts]
    outputs[f"{case}/image_z"] = np.stack(image_z)
    outputs[f"{case}/text_z"] = np.stack(text_z)
    outputs[f"{case}/sigmoid"] = sigmoid_loss(image_z, text_z)
    outputs[f"{case}/softmax"] = softmax_loss(image_z, text_z)
  return (
    {n: a if a.dtype.kind == "i" else np.float32(a) for n, a in inputs.items()},
    {n: np.float32(a) for n, a in outputs.items()},
  )


def text_shapes(options: dict) -> dict[str, tuple[int, ...]]:
  """Returns a ViT's shapes without patches, by the text tower's names."""
  D = make_vit.SIZES["width"]
  result = {
    name.replace("Transformer/", "Encoder_0/"): shape
    for name, shape in make_vit.shapes(options).items()
    if not name.startswith("embedding/")
  }
  result["pos_embedding"] = (1, TEXT_LEN, D)
  return {"Embed_0/embedding": (VOCAB, D), **result}


def encode(params: dict, text: np.ndarray, options: dict) -> np.ndarray:
  """Returns the text tower's embedding of one text, not normalised."""
  x = params["Embed_0/embedding"][text] + params["pos_embedding"][0]
  for i in range(make_vit.SIZES["depth"]):
    block = f"Encoder_0/encoderblock_{i}"
    y = make_vit.layer_norm(params, f"{block}/LayerNorm_0", x)
    name = f"{block}/MultiHeadDotProductAttention_0"
    x = x + make_vit.attend(params, name, y, y)
    y = make_vit.layer_norm(params, f"{block}/LayerNorm_1", x)
    x = x + make_vit.mlp(params, f"{block}/MlpBlock_0", y)
  x = make_vit.layer_norm(params, "Encoder_0/encoder_norm", x)
  if options["pool_type"] == "last":
    x = x[-1]
  else:
    name = "MAPHead_0/MultiHeadDotProductAttention_0"
    x = make_vit.attend(params, name, params["MAPHead_0/probe"][0], x)
    y = make_vit.layer_norm(params, "MAPHead_0/LayerNorm_0", x)
    x = (x + make_vit.mlp(params, "MAPHead_0/MlpBlock_0", y))[0]
  return make_vit.dense(params, "head", x)


def on_sphere(z: np.ndarray) -> np.ndarray:
  return z / math.sqrt(sum(value**2 for value in z))


def sigmoid_loss(image_z: list, text_z: list) -> np.ndarray:
  """Returns the binary cross-entropy of all pairs, summed over the texts."""
  total = 0.0
  for i, image in enumerate(image_z):
    for j, text in enumerate(text_z):
      logit = math.exp(T) * float(image @ text) + B
      probability = 1 / (1 + math.exp(-logit))
      total -= math.log(probability if i == j else 1 - probability)
  return np.array(total / len(image_z))


def softmax_loss(image_z: list, text_z: list) -> np.ndarray:
  """Returns the mean cross-entropy of both directions."""
  total = 0.0
  for queries, answers in ((image_z, text_z), (text_z, image_z)):
    for i, query in enumerate(queries):
      shares = [math.exp(math.exp(T) * float(query @ a)) for a in answers]
      total -= math.log(shares[i] / sum(shares))
  return np.array(total / 2 / len(image_z))


if __name__ == "__main__":
  np.savez_compressed(FILE, **make()[1])
  print(f"{FILE}: {FILE.stat().st_size:,} bytes")
