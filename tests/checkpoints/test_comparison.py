"""Two results of one computation are compared."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import flips

from bigtrain import sharding
from bigtrain.checkpoints import comparison, device_checksums


def placed(dtype, *spec):
  """An array [8, 3] on eight devices; NaN compares as equal bits."""
  values = np.arange(24).reshape(8, 3).astype(dtype)
  if np.dtype(dtype).kind == "f":
    values[0, 0] = np.nan
  place = NamedSharding(sharding.make_mesh(2, 4), PartitionSpec(*spec))
  return jax.device_put(values, place)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_flipped_bit_of_a_result_is_named(compiled, monkeypatch):
  start = functools.partial(device_checksums.start, compiled=compiled)
  monkeypatch.setattr(comparison.device_checksums, "start", start)
  tree = {
    "a": placed(np.float32, "fsdp"),
    "b": placed(ml_dtypes.bfloat16),
    "c": placed(np.int8, "fsdp"),  # Six bytes on each device.
  }
  compare = lambda other: comparison.results(tree, other)
  assert compare(dict(tree)) == ""
  for name, x in tree.items():
    for bit in range(8):
      device = bit
      what = compare(tree | {name: flips.flip(x, device, bit)})
      assert what.startswith(f"'{name}' on {jax.local_devices()[device]} of")
  worse = {name: flips.flip(x, 2) for name, x in tree.items()}
  assert compare(worse).startswith("'a' (the first of 3 arrays) on ")
