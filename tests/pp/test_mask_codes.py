"""Codes of masks against big_vision's: golden/mask_codes.npz."""

import pathlib

import numpy as np
import pytest
from support import mask_weights

from bigtrain.config.errors import ConfigError
from bigtrain.pp import mask_codes
from bigtrain.text import box_texts, mask_texts

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "mask_codes.npz"


@pytest.fixture(scope="module")
def coder():
  return mask_codes.Coder(mask_weights.arrays())


@pytest.fixture(scope="module")
def expected():
  return dict(np.load(GOLDEN))


@pytest.mark.golden
def test_masks_have_the_codes_of_big_vision(coder, expected):
  for i, (mask, edges) in enumerate(mask_weights.masks()):
    codes = coder.encode(mask, box_texts.Box(*edges))
    assert codes == expected["codes"][i].tolist()
  assert len(np.unique(expected["codes"])) > 4


@pytest.mark.golden
def test_masks_are_resized_as_tensorflow_does(expected):
  for i, (mask, edges) in enumerate(mask_weights.masks()):
    sides = np.multiply(edges, mask.shape * 2)
    top, left, bottom, right = np.round(sides).astype(int)
    inside = mask[top:bottom, left:right].astype(np.float32)
    got = mask_codes.resized(inside, (64, 64))
    np.testing.assert_allclose(got, expected["resized"][i], 0, 1e-5)


@pytest.mark.golden
def test_codes_are_decoded_and_pasted_as_by_big_vision(coder, expected):
  decoded = coder.decode(expected["codes"])
  np.testing.assert_allclose(decoded, expected["decoded"], 0, 1e-5)
  for i, (mask, edges) in enumerate(mask_weights.masks()):
    whole = np.zeros(mask.shape, bool)
    mask_codes.paste(expected["decoded"][i], box_texts.Box(*edges), whole)
    got = mask_codes.iou(whole, mask)
    # A pixel whose value is 0 but for rounding may fall on either side.
    assert got == pytest.approx(expected[f"iou {i}"], abs=2 / mask.sum())


def test_texts_of_masks():
  box = box_texts.Box(0.25, 0.1, 0.75, 0.6, "a cat")
  codes = [*range(15), 127]
  text = mask_texts.spell(box, codes)
  assert text.startswith("<loc0256><loc0102><loc0767><loc0614><seg000><seg001>")
  assert text.endswith("<seg127> a cat")
  (mask,) = mask_texts.read(text)
  assert mask.codes == tuple(codes)
  assert mask.box.label == "a cat"
  bad = text.replace("<seg127>", "<seg128>")
  short = text.replace("<seg127>", "")
  long = text.replace("<seg127>", "<seg127>" * 2)
  for each in (bad, short, long):
    assert mask_texts.read(each) == [None]
  several = mask_texts.read(f"{text} ; {bad} ; {text}")
  assert [x is None for x in several] == [False, True, False]
  assert mask_texts.read("a cat") == []


def test_masks_of_a_text_together(coder):
  box = box_texts.Box(0.0, 0.0, 0.5, 0.5, "cat")
  other = box_texts.Box(0.5, 0.5, 1.0, 1.0, "cat")
  text = " ; ".join(mask_texts.spell(x, [3] * 16) for x in (box, other))
  mask, number = mask_codes.decoded(coder, text + " ; <loc0001>", (20, 30))
  assert number == 0
  one, _ = mask_codes.decoded(coder, text.split(" ; ")[0], (20, 30))
  assert one.any() and not one[10:].any()
  np.testing.assert_array_equal(mask[10:, 15:], one[:10, :15])
  cut = text.replace("<seg003>", "", 1)
  assert mask_codes.decoded(coder, cut, (20, 30))[1] == 1


def test_thin_objects_have_codes(coder):
  mask = np.zeros((10, 10), bool)
  mask[4] = True
  assert len(coder.encode(mask, box_texts.Box(0.41, 0.0, 0.44, 1.0))) == 16


def test_wrong_weights_are_named(tmp_path):
  arrays = mask_weights.arrays()
  del arrays["decoder.3.net.2.bias"]
  path = str(tmp_path / "x.npz")
  np.savez(path, **arrays)
  for where, message in (
    (
      path,
      "weights='.*x.npz': expected .*vae-oid.npz; it has no decoder.3.net",
    ),
    (f"{path}.no", "weights=.*No such file"),
  ):
    with pytest.raises(ConfigError, match=message):
      mask_codes.load(where, "weights")
