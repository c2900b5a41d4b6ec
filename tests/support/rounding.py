"""What rounding may do to results in float32, whatever the processor.

Instruction sets add numbers in other orders, and so do libraries. A result in
float32 is the exact one of inputs that are off by a few roundings, so its error
is the condition of the problem times epsilon. `spread` measures this product:
it changes all inputs by one rounding, and looks how far results move.

Comparisons of float64 need none of this.
"""

import jax
import numpy as np

from bigtrain.arrays import trees

EPSILON = float(np.finfo(np.float32).eps)
# Both programs round after each operation, so an input is off by more than one
# rounding. The largest error of the golden files is twice the spread.
ROUNDINGS = 16
_SEEDS = range(6)


def spread(fn, inputs, values):
  """Returns {name: how far one rounding of all inputs moves an array}.

  Args:
    fn: function of a tree of arrays that returns another one.
    inputs: its argument; only float32 arrays are changed.
    values: {name: array} of fn(inputs).
  """
  result = dict.fromkeys(values, 0.0)
  for seed in _SEEDS:
    for name, x in _flat(fn(_moved(inputs, seed))).items():
      distance = np.abs(np.subtract(x, values[name], dtype=np.float64)).max()
      result[name] = max(result[name], distance)
  return result


def assert_close(fn, inputs, expected):
  """Compares fn(inputs) with the same tree from another program in float32."""
  actual, expected = _flat(fn(inputs)), _flat(expected)
  assert actual.keys() == expected.keys()
  moved = spread(fn, inputs, actual)
  sizes = {name: np.abs(x).max() for name, x in expected.items()}
  for name, value in expected.items():
    assert actual[name].shape == value.shape, name
    atol = ROUNDINGS * (moved[name] + EPSILON * sizes[name])
    # Gradients of keys' biases, for one, are zero but for rounding.
    size = max(sizes[name], 1e-2 * max(sizes.values()))
    assert atol <= 1e-2 * size, f"{name}: rounding may change all digits"
    np.testing.assert_allclose(
      actual[name], value, rtol=0, atol=atol, err_msg=name
    )


def assert_clear(fn, inputs):
  """Rounding must not change which number of a row of fn(inputs) is largest."""
  scores = np.asarray(fn(inputs))
  best = np.argsort(scores, axis=-1)[..., -2:]
  lead = lambda x: [np.diff(np.take_along_axis(np.asarray(fn(x)), best, -1))]
  (leads,) = lead(inputs)
  moved = spread(lead, inputs, {"0": leads})["0"]
  bound = ROUNDINGS * (moved + EPSILON * np.abs(scores).max())
  assert leads.min() > bound, "choose inputs with clearer results"


def leads(scores, k=1):
  """How far the k-th best of each row is ahead of the next one.

  Of the largest score: 1e-4 is a thousand times what float32 rounds off.
  """
  ranked = -np.sort(-scores, axis=-1)
  return (ranked[..., k - 1] - ranked[..., k]) / np.abs(scores).max()


def _flat(tree):
  return {n: np.asarray(x) for n, x in trees.flatten_with_names(tree)}


def _moved(tree, seed):
  """The tree with each float32 number larger or smaller by one rounding."""
  rng = np.random.default_rng(seed)

  def one(x):
    if x.dtype != np.float32:
      return x
    signs = rng.integers(0, 2, x.shape) * 2 - 1
    value = np.float32(np.asarray(x) * (1 + EPSILON * signs))
    placed = getattr(x, "committed", False)
    return jax.device_put(value, x.sharding) if placed else value

  return jax.tree.map(one, tree)
