"""Makes cappa.npz: expected outputs of models/cappa.py, in plain numpy.

  PYTHONPATH=tests python -m golden.make_cappa

Uses the encoder of make_vit.py. Like it, computes in float64, one caption,
position and head at a time, and shares no code with the model. Run it again
only after an intended change of the model, and explain the change in the
commit.
"""

import math
import pathlib

import numpy as np
from golden import make_vit

FILE = pathlib.Path(__file__).with_name("cappa.npz")

# Sizes of the decoder; make_vit.SIZES has the encoder's.
SIZES = dict(width=12, depth=3, mlp_dim=20, num_heads=3, vocab=9, max_len=7)
CASES = {
  "cap": dict(bias=True, posemb="learn", mask_token=False),
  "cappa": dict(bias=False, posemb="learn", mask_token=True),
  "sincos": dict(bias=False, posemb="sincos2d", mask_token=True),
}
TEXT_LEN = 6
PARALLEL = (True, False, True)


def make() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns (inputs, outputs), named "<case>/params/<name>" and so on."""
  inputs, outputs = {}, {}
  for seed, (case, options) in enumerate(CASES.items()):
    rng = np.random.RandomState(100 + seed)
    params = {n: make_vit.draw(rng, n, s) for n, s in shapes(options).items()}
    images = rng.uniform(-1, 1, make_vit.IMAGE_SHAPE)
    text = rng.randint(1, SIZES["vocab"], (len(images), TEXT_LEN))
    masked = rng.uniform(size=text.shape) < 0.6
    inputs.update({f"{case}/params/{n}": p for n, p in params.items()})
    inputs |= {f"{case}/image": images, f"{case}/text": text}
    inputs[f"{case}/masked"] = masked
    logits, mixed = [], []
    for i, (image, row) in enumerate(zip(images, text)):
      encoded = encode(params, image, options)
      in_order = [0, *row[:-1]]
      logits.append(decode(params, encoded, in_order, options, causal=True))
      if PARALLEL[i]:
        tokens = [SIZES["vocab"] if m else t for m, t in zip(masked[i], row)]
        if options["mask_token"]:
          mixed.append(decode(params, encoded, tokens, options, causal=False))
      else:
        mixed.append(logits[-1])
    outputs[f"{case}/logits"] = np.stack(logits)
    if options["mask_token"]:
      outputs[f"{case}/mixed"] = np.stack(mixed)
  return (
    {
      n: a if a.dtype.kind in "ib" else np.float32(a) for n, a in inputs.items()
    },
    {n: np.float32(a) for n, a in outputs.items()},
  )


def shapes(options: dict) -> dict[str, tuple[int, ...]]:
  D, H, F, V = (SIZES[k] for k in ("width", "num_heads", "mlp_dim", "vocab"))
  encoder = make_vit.shapes({"pool_type": "gap", "posemb": options["posemb"]})
  result = {f"encoder/{name}": shape for name, shape in encoder.items()}
  if options["posemb"] == "learn":
    result["pos_embedding_decoder"] = (1, SIZES["max_len"], D)
  rows = V + options["mask_token"]
  result["decoder/EmbedTargets/embedding"] = (rows, D)
  for i in range(SIZES["depth"]):
    block = f"decoder/EncDecBlock{i}"
    for attention, width in (
      ("SelfAttn", D),
      ("CrossAttn", make_vit.SIZES["width"]),
    ):
      result[f"{block}/{attention}/query/kernel"] = (D, H, D // H)
      result[f"{block}/{attention}/key/kernel"] = (width, H, D // H)
      result[f"{block}/{attention}/value/kernel"] = (width, H, D // H)
      result[f"{block}/{attention}/out/kernel"] = (H, D // H, D)
    result[f"{block}/MLP/Dense_0/kernel"] = (D, F)
    result[f"{block}/MLP/Dense_1/kernel"] = (F, D)
    for n in (1, 2, 3):
      result[f"{block}/LayerNorm{n}/scale"] = (D,)
    if options["bias"]:
      result[f"{block}/MLP/Dense_0/bias"] = (F,)
      result[f"{block}/MLP/Dense_1/bias"] = (D,)
      for n in (1, 2, 3):
        result[f"{block}/LayerNorm{n}/bias"] = (D,)
  result["decoder/LayerNorm/scale"] = (D,)
  result["decoder/LayerNorm/bias"] = (D,)
  result["decoder/LogitsDense/kernel"] = (D, V)
  result["decoder/LogitsDense/bias"] = (V,)
  return result


def encode(params: dict, image: np.ndarray, options: dict) -> np.ndarray:
  encoder = {
    name.removeprefix("encoder/"): value
    for name, value in params.items()
    if name.startswith("encoder/")
  }
  vit = {"pool_type": "gap", "posemb": options["posemb"]}
  return make_vit.forward(encoder, image, vit)["encoded"]


def decode(
  params: dict, encoded: np.ndarray, tokens: list, options: dict, causal: bool
) -> np.ndarray:
  """Returns logits (L, V) of one caption for the decoder's input tokens."""
  x = params["decoder/EmbedTargets/embedding"][tokens]
  for position in range(len(tokens)):
    if options["posemb"] == "learn":
      place = params["pos_embedding_decoder"][0, position]
    else:
      place = make_vit.sincos(0, position, SIZES["width"])
    x[position] += place
  for i in range(SIZES["depth"]):
    block = f"decoder/EncDecBlock{i}"
    y = norm(params, f"{block}/LayerNorm1", x)
    seen = [y[: p + 1] if causal else y for p in range(len(tokens))]
    x = x + attend(params, f"{block}/SelfAttn", y, seen)
    y = norm(params, f"{block}/LayerNorm2", x)
    seen = [encoded] * len(tokens)
    x = x + attend(params, f"{block}/CrossAttn", y, seen)
    y = norm(params, f"{block}/LayerNorm3", x)
    h = dense(params, f"{block}/MLP/Dense_0", y)
    h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    x = x + dense(params, f"{block}/MLP/Dense_1", h)
  x = norm(params, "decoder/LayerNorm", x)
  return dense(params, "decoder/LogitsDense", x)


def dense(params: dict, name: str, x: np.ndarray) -> np.ndarray:
  return x @ params[f"{name}/kernel"] + params.get(f"{name}/bias", 0)


def norm(params: dict, name: str, x: np.ndarray) -> np.ndarray:
  centred = x - x.mean(-1, keepdims=True)
  normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  return normal * params[f"{name}/scale"] + params.get(f"{name}/bias", 0)


def attend(
  params: dict, name: str, x: np.ndarray, seen: list[np.ndarray]
) -> np.ndarray:
  """Position p of x attends to the rows of seen[p]."""
  result = np.zeros_like(x)
  for head in range(SIZES["num_heads"]):
    wq, wk, wv = (
      params[f"{name}/{part}/kernel"][:, head]
      for part in ("query", "key", "value")
    )
    for p in range(len(x)):
      scores = (seen[p] @ wk) @ (x[p] @ wq) / math.sqrt(wq.shape[-1])
      weights = np.exp(scores) / np.exp(scores).sum()
      value = weights @ (seen[p] @ wv)
      result[p] += value @ params[f"{name}/out/kernel"][head]
  return result


if __name__ == "__main__":
  np.savez_compressed(FILE, **make()[1])
  print(f"{FILE}: {FILE.stat().st_size:,} bytes")
