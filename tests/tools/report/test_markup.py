"""Pieces of HTML."""

import io

import numpy as np
import pytest

from bigtrain.tools.report import markup

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_png(channels):
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (5, 7, channels), np.uint8)
  decoded = np.asarray(Image.open(io.BytesIO(markup.png(image))))
  np.testing.assert_array_equal(decoded.reshape(image.shape), image)


def test_text_is_escaped():
  table = markup.by_run(["<a>"], {"<b>": ["<c>"]})
  table += markup.details("<d>", {"<e>": "<f>"})
  for letter in "abcdef":
    assert f"&lt;{letter}&gt;" in table and f"<{letter}>" not in table
