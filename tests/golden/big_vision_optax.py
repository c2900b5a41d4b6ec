"""Makes big_vision_optax.npz: three small problems in big_vision's optimizers.

  PYTHONPATH=big_vision python tests/golden/big_vision_optax.py

PYTHONPATH needs a checkout of github.com/google-research/big_vision; commit
0127fb6 made the file. The file has the parameters after training;
tests/optim/test_chain.py trains on the same `problems`.
"""

import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
NUM_STEPS = 6
BATCH_SIZE, EXAMPLES_PER_EPOCH, TOTAL_STEPS = 4, 12, 9
SHAPES = {
  "body/dense/kernel": (34, 36),
  "body/dense/bias": (36,),
  "body/stack/kernel": (2, 32, 33),
  "embedding": (5, 8),
  "head/kernel": (8, 16),
}


def problems() -> dict[str, dict]:
  """Returns big_vision's configs; "ours" is our config of the optimizer."""
  return {
    "adafactor": dict(
      ours=dict(
        name="big_vision_adafactor", beta2_cap=0.6, dtype_momentum="float32"
      ),
      optax_name="big_vision.scale_by_adafactor",
      optax=dict(beta2_cap=0.6, dtype_momentum="float32"),
      lr=0.1,
      wd=0.03,
      grad_clip_norm=20.0,
      schedule=dict(decay_type="cosine", warmup_steps=2),
    ),
    "adafactor_bfloat16": dict(
      ours=dict(name="big_vision_adafactor"),
      optax_name="big_vision.scale_by_adafactor",
      optax=dict(),
      lr=0.1,
      schedule=dict(decay_type="cosine"),
    ),
    "adam": dict(
      ours=dict(name="scale_by_adam", b2=0.99),
      optax_name="scale_by_adam",
      optax=dict(b2=0.99),
      lr=0.1,
      wd=0.03,
      wd_mults=[("embedding", 2.0), ("body/.*kernel", 0.5)],
      lr_mults=[("body/.*", 0.1), (".*/kernel", 3.0)],
      grad_clip_norm=1.0,
      schedule=[
        ("body/stack/.*", None),
        (
          "head/.*",
          dict(
            decay_type="rsqrt",
            timescale_examples=8,
            warmup_steps=2,
            cooldown_steps=4,
          ),
        ),
        (".*", dict(decay_type="linear", linear_end=0.2, warmup_epochs=0.5)),
      ],
    ),
  }


def array(name: str, step: int) -> np.ndarray:
  """Returns the parameter (step 0) or its gradient in step 1, 2, ..."""
  rng = np.random.default_rng([step, *name.encode()])
  return rng.normal(size=SHAPES[name]).astype(np.float32)


def main() -> None:
  import big_vision.optax  # Registers big_vision's optimizers with optax.
  import flax.traverse_util
  import jax
  import ml_collections
  import optax

  result = {}
  for problem, config in problems().items():

    def tree(step: int) -> dict:
      flat = {name: array(name, step) for name in SHAPES}
      return flax.traverse_util.unflatten_dict(flat, sep="/")

    params = tree(0)
    tx, _ = big_vision.optax.make(
      ml_collections.ConfigDict(config),
      params,
      sched_kw=dict(
        total_steps=TOTAL_STEPS,
        batch_size=BATCH_SIZE,
        data_size=EXAMPLES_PER_EPOCH,
      ),
    )
    state = tx.init(params)
    # Compiled, as in big_vision's trainer. Eager bfloat16 products are rounded
    # more often.
    update = jax.jit(tx.update)
    for step in range(1, NUM_STEPS + 1):
      updates, state = update(tree(step), state, params)
      params = optax.apply_updates(params, updates)
    for name, value in flax.traverse_util.flatten_dict(params, sep="/").items():
      result[f"{problem}/{name}"] = np.asarray(value)
  np.savez(PATH, **result)


if __name__ == "__main__":
  main()
