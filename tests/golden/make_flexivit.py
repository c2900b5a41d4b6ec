"""Makes flexivit.npz: big_vision's FlexiViT at five sizes.

  PYTHONPATH=big_vision python tests/golden/make_flexivit.py

PYTHONPATH needs a checkout of github.com/google-research/big_vision; commit
0127fb6 made the file. tests/models/test_flexivit.py draws the same `inputs`.
"""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
NEEDS = ("big_vision", "jax")
SIZES = dict(width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(8, 8))
GRID, CLASSES, IMAGE_SIZE = (3, 3), 5, 60
SEQHWS = (3, 4, 5, 6, 10)  # Patches of 20, 15, 12, 10, 6 pixels.


def inputs(shapes: dict[str, tuple]) -> tuple[np.ndarray, dict]:
  """Images, and a parameter of each shape."""
  rng = np.random.RandomState(0)
  image = rng.normal(size=(2, IMAGE_SIZE, IMAGE_SIZE, 3)).astype(np.float32)
  params = {
    name: rng.normal(name.endswith("scale"), 0.3, shapes[name])
    for name in sorted(shapes)
  }
  return image, {name: p.astype(np.float32) for name, p in params.items()}


def write(golden: pathlib.Path = GOLDEN) -> None:
  import jax
  from flax import traverse_util

  jax.tree_map = jax.tree.map  # As it was called then.
  from big_vision.models.proj.flexi import vit

  model = vit.Model(
    CLASSES, posemb_size=GRID, pool_type="tok", head_zeroinit=False, **SIZES
  )
  image = np.zeros((1, 24, 24, 3), np.float32)
  like = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  like = traverse_util.flatten_dict(dict(like), sep="/")
  image, params = inputs({name: p.shape for name, p in like.items()})
  arrays = {}
  kernel = params["embedding/kernel"]
  params = traverse_util.unflatten_dict(params, sep="/")
  for seqhw in SEQHWS:
    size = IMAGE_SIZE // seqhw
    resized = vit.resample_patchemb(kernel, (size, size))
    arrays[f"kernel/{seqhw}"] = resized[..., 0]  # Features do not mix.
    arrays[f"logits/{seqhw}"], _ = model.apply(
      {"params": params}, image, seqhw=seqhw
    )
  np.savez_compressed(
    golden / "flexivit.npz", **{k: np.asarray(v) for k, v in arrays.items()}
  )


if __name__ == "__main__":
  write()
