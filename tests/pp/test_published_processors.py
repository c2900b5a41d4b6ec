"""The op `published` against transformers: golden/image_processors.npz."""

import json
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.pp import host_tensorflow, parse, registry

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "image_processors.npz"
NAMES = ("vit", "clip", "dinov2", "siglip", "plain")


def pixels(folder, image):
  op = registry.compose(parse.parse(f"published({str(folder)!r})"))
  tf = host_tensorflow.load()
  return op.fn({"image": tf.constant(image)}, tf.zeros([1]))["image"]


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_transformers(name, tmp_path):
  with np.load(GOLDEN) as file:
    golden = dict(file)
  values = json.loads(str(golden["CONFIGS"]))[name]
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
  actual = np.asarray(pixels(tmp_path, golden["image"]))
  assert actual.shape == golden[name].shape
  normalized = values.get("do_normalize", True)
  std = np.asarray(values["image_std"] if normalized else [1.0] * 3)
  levels = np.abs(actual - golden[name]) * std * 255
  # Resized pixels are rounded to bytes, of other float sums.
  assert levels.max() < 1.01
  assert (levels > 0.01).mean() < 0.02


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (None, "preprocessor_config.json: cannot be read"),
    (dict(resample=1), "expected resample of"),
    (dict(crop_pct=0.9), "no crop_pct"),
  ],
)
def test_what_is_not_known_is_an_error(values, message, tmp_path):
  if values is not None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
  with pytest.raises(ConfigError, match=message):
    pixels(tmp_path, np.zeros((30, 30, 3), np.uint8))


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_pixels_are_those_of_timm(mode, tmp_path):
  with np.load(GOLDEN.with_name("timm_pixels.npz")) as file:
    image, expected = file["image"], file[mode]
  mean, std = np.asarray([0.4, 0.5, 0.6]), np.asarray([0.2, 0.3, 0.25])
  values = dict(input_size=[3, 16, 16], interpolation="bicubic", crop_pct=0.9)
  values |= dict(crop_mode=mode, mean=mean.tolist(), std=std.tolist())
  content = dict(architecture="vit_tiny_patch16_224", pretrained_cfg=values)
  (tmp_path / "config.json").write_text(json.dumps(content))
  actual = (np.asarray(pixels(tmp_path, image)) * std + mean) * 255
  assert np.abs(actual - expected).max() < 1.01
  assert (np.abs(actual - expected) > 0.01).mean() < 0.02
