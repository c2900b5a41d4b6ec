"""Slices in the syntax of tensorflow-datasets."""

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.data.formats import splits


@pytest.mark.parametrize(
  "text, length, expected",
  [
    ("", 10, (0, 10)),
    ("[:]", 10, (0, 10)),
    ("[3:]", 10, (3, 10)),
    ("[:3]", 10, (0, 3)),
    ("[2:5]", 10, (2, 5)),
    ("[-4:]", 10, (6, 10)),
    ("[:-4]", 10, (0, 6)),
    ("[10%:20%]", 200, (20, 40)),
    ("[:99%]", 1281167, (0, 1268355)),
    ("[99%:]", 1281167, (1268355, 1281167)),
    ("[-10%:]", 100, (90, 100)),
    ("[:33.3%]", 1000, (0, 333)),
    ("[ 1 : 2 ]", 10, (1, 2)),
  ],
)
def test_bounds(text, length, expected):
  assert splits.bounds(text, length, "key") == expected


@pytest.mark.parametrize(
  "text, message",
  [
    ("[:11]", "11 is more than the 10 examples"),
    ("[:110%]", "110% is more than 100%"),
    ("[5:5]", "selects no examples"),
    ("[7:3]", "selects no examples"),
    ("[a:b]", "expected a slice"),
    ("[:3", "expected a slice"),
    ("[3]", "expected a slice"),
    ("train[:3]", "got 'train'"),
    (7, "expected a slice"),
  ],
)
def test_invalid_slices(text, message):
  with pytest.raises(ConfigError, match=r"^key") as error:
    splits.bounds(text, 10, "key")
  assert message in str(error.value)


def test_split_name():
  assert splits.split_name("train[:80%]", "key") == ("train", "[:80%]")
  assert splits.split_name("train", "key") == ("train", "")
  assert splits.split_name("[1:]", "key") == ("", "[1:]")


def test_an_unknown_split_is_named_once():
  message = r"^data: split: unknown 'tets'\. Did you mean 'test'\?$"
  with pytest.raises(ConfigError, match=message):
    splits.choose("tets[:5]", {"train": 1, "test": 2}, "data: split")
