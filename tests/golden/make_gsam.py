"""Makes gsam.npz: four steps of a small problem with big_vision's GSAM.

  PYTHONPATH=big_vision python tests/golden/make_gsam.py

PYTHONPATH needs a checkout of github.com/google-research/big_vision; commit
0127fb6 made the file. tests/objective/test_sharpness.py trains on `problem`.
"""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
NEEDS = ("big_vision", "jax")
LRS = (0.1, 0.4, 0.25, 0.05)
CASES = {
  "sam": dict(rho_max=0.5, rho_min=0.5, alpha=0.0),
  "gsam": dict(rho_max=0.6, rho_min=0.1, alpha=0.6),
  "clean": dict(rho_max=0.6, rho_min=0.1, alpha=0.6, minimize_fp=False),
  "adaptive": dict(
    rho_max=2.0, rho_min=0.1, alpha=0.3, adaptive_perturbation=True
  ),
}
LR_RANGE = dict(lr_max=0.4, lr_min=0.02)


def problem() -> tuple[dict, list]:
  """Returns the first parameters, and (inputs, targets) of each step."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {"first": draw(5, 8) / 2, "second": draw(8, 3) / 3}
  return params, [(draw(16, 5), draw(16, 3)) for _ in LRS]


def loss(params, inputs, targets):
  """The mean over examples."""
  import jax.numpy as jnp

  out = jnp.tanh(inputs @ params["first"]) @ params["second"]
  return jnp.mean(jnp.sum((out - targets) ** 2, axis=-1))


def write(golden: pathlib.Path = GOLDEN) -> None:
  import jax

  jax.tree_map = jax.tree.map  # As it was called then.
  from big_vision.trainers.proj.gsam import gsam

  arrays = {}
  for name, options in CASES.items():
    params, batches = problem()
    for lr, (inputs, targets) in zip(LRS, batches):
      _, grads = gsam.gsam_gradient(
        loss, params, inputs, targets, lr=lr, **options, **LR_RANGE
      )
      params = jax.tree.map(lambda p, g, lr=lr: p - lr * g, params, grads)
    arrays |= {f"{name}/{key}": np.asarray(p) for key, p in params.items()}
  np.savez(golden / "gsam.npz", **arrays)


if __name__ == "__main__":
  write()
