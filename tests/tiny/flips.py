"""Flips single bits on one device, as broken hardware would."""

import jax
import numpy as np

from bigtrain.arrays import trees


def flip(x, device, bit=4):
  """Returns an array that differs in one bit of the shard on one device.

  Args:
    x: jax.Array.
    device: number of the device among those of this process.
    bit: number of the bit in the first byte.
  """
  shards = []
  for number, shard in enumerate(x.addressable_shards):
    data = np.array(shard.data)
    if number == device:
      data.reshape(-1).view(np.uint8)[0] ^= 1 << bit
    shards.append(jax.device_put(data, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


class Flips:
  """A hook that flips a bit of the state, or of the tally, once.

  Args:
    step: the step.
    name: end of the name of the array in the state or tally.
    device: see `flip`.
    when: "before" or "after" the update, for the state; "tally" for the tally
      after it.
    only: index of the only process that does so; None for all.
  """

  flipped = False  # In this process, whatever the number of runs.

  def __init__(self, step, name, device=3, when="before", only=None):
    self._step, self._name, self._device = step, name, device
    self._when = when
    self._only = only

  def around_update(self, step, update, state, *rest):
    """Computes the step."""
    state = self._flip(step, "before", state)
    state, tally = update(state, *rest)
    tally = self._flip(step, "tally", tally)
    return self._flip(step, "after", state), tally

  def _flip(self, step, when, tree):
    here = self._only in (None, jax.process_index())
    if (step, when) != (self._step, self._when) or Flips.flipped or not here:
      return tree
    Flips.flipped = True
    return trees.map_with_names(
      lambda name, x: flip(x, self._device) if name.endswith(self._name) else x,
      tree,
    )
