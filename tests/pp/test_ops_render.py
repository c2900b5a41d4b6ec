"""Pictures of text: equal to big_vision's, given the same font."""

import importlib.util
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.pp import parse

_PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_clippo.py"
_SPEC = importlib.util.spec_from_file_location("make_clippo", _PATH)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)


@pytest.fixture
def font(tmp_path):
  path = tmp_path / "font.hex"
  path.write_text("".join(golden.font()))
  return path


@pytest.mark.parametrize("size", golden.SIZES)
def test_pictures_equal_big_vision(size, font):
  (op,) = parse.parse(f"render_text({size},font={str(font)!r})")
  with np.load(golden.GOLDEN / "clippo.npz") as expected:
    for i, text in enumerate(golden.TEXTS):
      picture = op.fn({"text": text}, np.zeros(0))["labels"]
      assert picture.dtype == np.uint8
      np.testing.assert_array_equal(picture, expected[f"{size}/{i}"], text)
  assert len(np.unique(picture)) == 1  # Spaces are blank.


def test_lists_of_texts_and_empty_ones_have_pictures(font):
  (op,) = parse.parse(f"render_text(32,font={str(font)!r},key_result='p')")
  pictures = op.fn({"text": np.array([b"a", b""], object)}, np.zeros(0))["p"]
  assert pictures.shape == (2, 32, 32, 3)
  assert (pictures[1] == 127).all() and (pictures[0] == 0).any()


def test_a_missing_font_names_its_package():
  with pytest.raises(ConfigError, match="apt-get install unifont"):
    parse.parse("render_text(32,font='none.hex')")
