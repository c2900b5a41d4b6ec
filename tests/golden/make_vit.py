"""Makes vit.npz: expected outputs of models/vit.py, in plain numpy.

  python tests/golden/make_vit.py

The computation is in float64, one image and head at a time, and shares no code
with the model. Run it again only after an intended change of the model, and
explain the change in the commit.
"""

import math
import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_name("vit.npz")

SIZES = dict(width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(4, 2))
CASES = {
  "tok": dict(pool_type="tok", rep_size=True, num_classes=5),
  "gap": dict(pool_type="gap", num_classes=5),
  "map": dict(pool_type="map", posemb="sincos2d"),
}
IMAGE_SHAPE = (3, 8, 6, 3)


def make() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns (inputs, outputs), named "<case>/params/<name>" and so on.

  The file has only the outputs: RandomState draws the same inputs in every
  version of numpy.
  """
  inputs, outputs = {}, {}
  for seed, (case, options) in enumerate(CASES.items()):
    rng = np.random.RandomState(seed)
    params = {n: draw(rng, n, s) for n, s in shapes(options).items()}
    images = rng.uniform(-1, 1, IMAGE_SHAPE)
    inputs[f"{case}/image"] = images
    inputs.update({f"{case}/params/{n}": p for n, p in params.items()})
    rows = [forward(params, image, options) for image in images]
    for name in rows[0]:
      outputs[f"{case}/{name}"] = np.stack([row[name] for row in rows])
  as_float32 = lambda arrays: {n: np.float32(a) for n, a in arrays.items()}
  return as_float32(inputs), as_float32(outputs)


def draw(rng: np.random.RandomState, name: str, shape: tuple) -> np.ndarray:
  scale = 0.25 if name.endswith("kernel") else 0.5
  return rng.normal(size=shape) * scale + name.endswith("scale")


def shapes(options: dict) -> dict[str, tuple[int, ...]]:
  D, H, F = SIZES["width"], SIZES["num_heads"], SIZES["mlp_dim"]
  p, q = SIZES["patch_size"]
  grid = IMAGE_SHAPE[1] // p, IMAGE_SHAPE[2] // q
  result = {"embedding/kernel": (p, q, 3, D), "embedding/bias": (D,)}
  if options.get("posemb") != "sincos2d":
    result["pos_embedding"] = (1, grid[0] * grid[1], D)

  def norm(name):
    result.update({f"{name}/scale": (D,), f"{name}/bias": (D,)})

  def attention(name):
    for part in ("query", "key", "value"):
      result[f"{name}/{part}/kernel"] = (D, H, D // H)
      result[f"{name}/{part}/bias"] = (H, D // H)
    result[f"{name}/out/kernel"] = (H, D // H, D)
    result[f"{name}/out/bias"] = (D,)

  def dense(name, inputs, outputs):
    result[f"{name}/kernel"] = (inputs, outputs)
    result[f"{name}/bias"] = (outputs,)

  for i in range(SIZES["depth"]):
    block = f"Transformer/encoderblock_{i}"
    norm(f"{block}/LayerNorm_0")
    attention(f"{block}/MultiHeadDotProductAttention_0")
    norm(f"{block}/LayerNorm_1")
    dense(f"{block}/MlpBlock_0/Dense_0", D, F)
    dense(f"{block}/MlpBlock_0/Dense_1", F, D)
  norm("Transformer/encoder_norm")
  if options["pool_type"] == "tok":
    result["cls"] = (1, 1, D)
  if options["pool_type"] == "map":
    result["MAPHead_0/probe"] = (1, 1, D)
    attention("MAPHead_0/MultiHeadDotProductAttention_0")
    norm("MAPHead_0/LayerNorm_0")
    dense("MAPHead_0/MlpBlock_0/Dense_0", D, F)
    dense("MAPHead_0/MlpBlock_0/Dense_1", F, D)
  if options.get("rep_size"):
    dense("pre_logits", D, D)
  if options.get("num_classes"):
    dense("head", D, options["num_classes"])
  return result


def forward(params: dict, image: np.ndarray, options: dict) -> dict:
  """Returns the outputs for one image, (height, width, 3)."""
  p, q = SIZES["patch_size"]
  rows, columns = image.shape[0] // p, image.shape[1] // q
  tokens = []
  for r in range(rows):
    for c in range(columns):
      patch = image[r * p : (r + 1) * p, c * q : (c + 1) * q]
      kernel = params["embedding/kernel"]
      token = np.einsum("pqc,pqcd->d", patch, kernel)
      token = token + params["embedding/bias"]
      if options.get("posemb") == "sincos2d":
        token = token + sincos(r, c, SIZES["width"])
      else:
        token = token + params["pos_embedding"][0, r * columns + c]
      tokens.append(token)
  if options["pool_type"] == "tok":
    tokens.insert(0, params["cls"][0, 0])
  x = np.stack(tokens)

  for i in range(SIZES["depth"]):
    block = f"Transformer/encoderblock_{i}"
    y = layer_norm(params, f"{block}/LayerNorm_0", x)
    x = x + attend(params, f"{block}/MultiHeadDotProductAttention_0", y, y)
    y = layer_norm(params, f"{block}/LayerNorm_1", x)
    x = x + mlp(params, f"{block}/MlpBlock_0", y)
  x = layer_norm(params, "Transformer/encoder_norm", x)

  outputs = {"encoded": x}
  if options["pool_type"] == "tok":
    outputs["encoded"], x = x[1:], x[0]
  elif options["pool_type"] == "gap":
    x = x.mean(0)
  else:
    name = "MAPHead_0/MultiHeadDotProductAttention_0"
    x = attend(params, name, params["MAPHead_0/probe"][0], x)
    y = layer_norm(params, "MAPHead_0/LayerNorm_0", x)
    x = (x + mlp(params, "MAPHead_0/MlpBlock_0", y))[0]
  outputs["head_input"] = x
  if options.get("rep_size"):
    x = np.tanh(dense(params, "pre_logits", x))
  outputs["pre_logits"] = x
  if options.get("num_classes"):
    x = dense(params, "head", x)
  outputs["logits"] = x
  return outputs


def sincos(row: int, column: int, width: int) -> np.ndarray:
  quarter = width // 4
  values = []
  for position in (column, row):
    angles = [position / 10_000 ** (k / (quarter - 1)) for k in range(quarter)]
    values += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
  return np.array(values)


def dense(params: dict, name: str, x: np.ndarray) -> np.ndarray:
  return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def layer_norm(params: dict, name: str, x: np.ndarray) -> np.ndarray:
  centred = x - x.mean(-1, keepdims=True)
  variance = (centred**2).mean(-1, keepdims=True)
  normal = centred / np.sqrt(variance + 1e-6)
  return normal * params[f"{name}/scale"] + params[f"{name}/bias"]


def mlp(params: dict, name: str, x: np.ndarray) -> np.ndarray:
  h = dense(params, f"{name}/Dense_0", x)
  cubic = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
  return dense(params, f"{name}/Dense_1", 0.5 * h * (1 + np.tanh(cubic)))


def attend(params: dict, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  result = np.zeros_like(x) + params[f"{name}/out/bias"]
  for head in range(SIZES["num_heads"]):
    q, k, v = (
      inputs @ params[f"{name}/{part}/kernel"][:, head]
      + params[f"{name}/{part}/bias"][head]
      for part, inputs in (("query", x), ("key", y), ("value", y))
    )
    weights = np.exp(q @ k.T / math.sqrt(q.shape[-1]))
    weights = weights / weights.sum(-1, keepdims=True)
    result = result + weights @ v @ params[f"{name}/out/kernel"][head]
  return result


if __name__ == "__main__":
  np.savez_compressed(FILE, **make()[1])
  print(f"{FILE}: {FILE.stat().st_size:,} bytes")
