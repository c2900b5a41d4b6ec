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


def test_stacks_may_have_layers_before_and_after_their_periods():
  single = {f"blocks_{i}/bias": np.full(2, i) for i in range(8)}
  like = {f"blocks/{place}/bias": None for place in range(3)}
  like |= {"blocks_0/bias": None, "blocks_7/bias": None}
  stacked = blocks.restack_blocks(single, like, block="blocks")
  assert stacked.keys() == like.keys()
  np.testing.assert_array_equal(stacked["blocks/1/bias"][:, 0], [2, 5])
  assert stacked["blocks_7/bias"][0] == 7
  again = blocks.restack_blocks(stacked, single, block="blocks")
  assert again.keys() == single.keys()
  jax.tree.map(np.testing.assert_array_equal, again, single)
  # From one loop to another one with other first layers.
  other = {"blocks/bias": None, "blocks_0/bias": None, "blocks_1/bias": None}
  moved = blocks.restack_blocks(stacked, other, block="blocks")
  assert moved.keys() == other.keys()
  np.testing.assert_array_equal(moved["blocks/bias"][:, 0], range(2, 8))
