"""Pairs of digits: pictures, captions, labels, and disjoint splits."""

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.data import arrays, digit_pairs


@pytest.fixture(scope="module")
def train():
  return digit_pairs.Source(split="train", length=5000, margin=1)


def cells(source, indices):
  """Returns the two halves of each picture."""
  image = source.read(np.asarray(indices))["image"]
  return np.split(image, 2, axis=2)


def rows_of_digits_in(cell, digits):
  """Returns the rows of `digits` that appear anywhere in a cell."""
  room = cell.shape[0] - 8 + 1
  windows = np.stack(
    [cell[t : t + 8, s : s + 8] for t in range(room) for s in range(room)]
  )
  return np.flatnonzero((digits[:, None] == windows).all((2, 3, 4)).any(1))


def test_pictures_match_captions_and_labels(train):
  rows = train.read(np.arange(200))
  digits = arrays.Source(name="digits", split="train")
  digits = digits.read(np.arange(len(digits)))
  for i in (0, 7, 38, 81, 100, 138):
    for side, half in enumerate(np.split(rows["image"][i], 2, axis=1)):
      shown = digits["label"][rows_of_digits_in(half, digits["image"])]
      assert set(shown) == {(rows["left"][i], rows["right"][i])[side]}
  assert rows["text"][73] == b"a seven left of a three"
  assert rows["text"][8] == b"a zero left of an eight"
  np.testing.assert_array_equal(
    rows["label"], 10 * rows["left"] + rows["right"]
  )
  assert np.bincount(rows["label"], minlength=100).tolist() == [2] * 100
  assert len(set(digit_pairs.CAPTIONS)) == 100
  assert {len(rows[name]) for name in train.spec} == {200}
  for name, (dtype, shape) in train.spec.items():
    assert rows[name].shape[1:] == shape
    assert rows[name].dtype == (object if dtype is bytes else dtype)


def test_a_share_of_the_captions_is_wrong(train):
  options = dict(split="train", length=5000, margin=1)
  noisy = digit_pairs.Source(**options, wrong_captions=0.3)
  rows, clean = (x.read(np.arange(2000)) for x in (noisy, train))
  is_right = rows["text"] == clean["text"]
  np.testing.assert_array_equal(rows["is_right"], is_right.astype(np.float32))
  assert is_right.mean() == pytest.approx(0.7, abs=0.04)
  wrong = rows["text"][~is_right]
  assert len({*wrong}) == 100
  for name in ("image", "label"):
    np.testing.assert_array_equal(rows[name], clean[name])
  assert "is_right" not in clean
  assert noisy.fingerprint() != train.fingerprint()


def test_an_example_depends_only_on_its_number(train):
  again = digit_pairs.Source(split="train", length=5000, margin=1)
  alone = again.read(np.array([4321]))
  together = train.read(np.arange(4300, 4350))
  for name in train.spec:
    np.testing.assert_array_equal(alone[name][0], together[name][21])
  other = digit_pairs.Source(split="train", length=5000, margin=1, seed=1)
  picture = other.read(np.array([4321]))["image"]
  assert (picture != alone["image"]).any()


def test_digits_and_positions_vary(train):
  left, right = cells(train, np.arange(1000, dtype=np.int64) * 100 % 5000)
  assert len(np.unique(left.reshape(len(left), -1), axis=0)) > 45
  assert (left != right).any((1, 2, 3)).all()
  # All nine positions are about equally frequent; a third touch the top row.
  corners = cells(train, np.arange(2000))[0][:, 0, 1:-1].any((1, 2))
  assert 0.2 < corners.mean() < 0.45


def test_pairs_of_the_test_split_use_only_digits_of_the_test_split():
  test = digit_pairs.Source(split="test", length=300)
  train_digits = arrays.Source(name="digits", split="train")
  train_digits = train_digits.read(np.arange(len(train_digits)))["image"]
  test_digits = arrays.Source(name="digits", split="test")
  test_digits = test_digits.read(np.arange(len(test_digits)))["image"]
  for half in cells(test, np.arange(300)):
    for digit in half:
      assert rows_of_digits_in(digit, test_digits).size
      assert not rows_of_digits_in(digit, train_digits).size


def test_fingerprint_and_where():
  make = digit_pairs.Source
  prints = {
    make(split="test", **kw).fingerprint()
    for kw in ({}, {"length": 9}, {"margin": 1}, {"seed": 1})
  } | {make(split="train").fingerprint()}
  assert len(prints) == 5
  assert make(split="test").where(3) == "digit pairs test, number 3"


@pytest.mark.parametrize(
  ("kw", "message"),
  [
    (dict(length=0), "length: expected a whole number at least 1, got 0"),
    (dict(margin=-1), "margin: expected a whole number at least 0"),
    (dict(split="trian"), "Did you mean 'train'"),
    (dict(split="test[:5]"), "contains no "),
  ],
)
def test_mistakes(kw, message):
  with pytest.raises(ConfigError, match=message):
    digit_pairs.Source(**kw)
