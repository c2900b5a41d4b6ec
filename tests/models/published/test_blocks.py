"""Stacked and separate blocks."""

import jax
import numpy as np

from bigtrain.models.published import blocks


def test_blocks_are_stacked_and_unstacked():
  names = [f"t/encoderblock_{i}/Dense_0/bias" for i in range(12)]
  single = {name: np.full(2, i) for i, name in enumerate(names)}
  single["t/encoder_norm/bias"] = np.zeros(2)
  like = {"t/encoderblock/Dense_0/bias": None, "t/encoder_norm/bias": None}
  stacked = blocks.restack_blocks(single, like)
  assert stacked.keys() == like.keys()
  np.testing.assert_array_equal(
    stacked["t/encoderblock/Dense_0/bias"][:, 0], np.arange(12)
  )
  again = blocks.restack_blocks(stacked, single)
  assert again.keys() == single.keys()
  jax.tree.map(np.testing.assert_array_equal, again, single)
  # Blocks in the wanted form, and blocks without a wanted form, stay.
  assert blocks.restack_blocks(single, single) == single
  assert blocks.restack_blocks(stacked, {}) == stacked


def test_blocks_that_cannot_be_stacked_are_listed():
  single = {f"t/encoderblock_{i}/bias": np.zeros(2) for i in (0, 1, 3)}
  like = {"t/encoderblock/bias": None}
  # Block 3 must not become block 2.
  assert not blocks.restack_blocks(single, like).keys() & like.keys()
  single["t/encoderblock_2/bias"] = np.zeros(2)
  assert blocks.restack_blocks(single, like).keys() == like.keys()
  single["t/encoderblock_2/bias"] = np.zeros(3)
  listed = blocks.restack_blocks(single, like)
  assert len(listed) == 4 and not listed.keys() & like.keys()
