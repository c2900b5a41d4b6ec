"""Boxes: their overlap by hand, missing ones, and the picture."""

import numpy as np
import pytest
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import box_overlap

TARGET = np.array([0.0, 0.0, 0.5, 0.5], np.float32)
# A box, and its overlap with TARGET.
CASES = [
  ([0.0, 0.0, 0.5, 0.5], 1.0),
  ([0.0, 0.0, 0.5, 0.25], 0.5),
  ([0.25, 0.25, 0.75, 0.75], 1 / 7),
  ([0.5, 0.5, 1.0, 1.0], 0.0),
  ([0.5, 0.5, 0.2, 0.2], 0.0),  # The corners are the wrong way round.
]


@pytest.mark.parametrize("box, expected", CASES)
def test_the_overlap_is_the_share_of_the_union(box, expected):
  value = box_overlap.overlap(np.array([box], np.float32), TARGET[None])
  np.testing.assert_allclose(value, [expected], rtol=1e-6)


def build(target, mesh=(2, 4), **options):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=8)
  predicted = np.array([box for box, _ in CASES], np.float32)
  columns = dict(
    image=np.zeros((len(CASES), 8, 8, 1), np.float32),
    box=np.asarray(target, np.float32),
    predicted=predicted,
  )
  data = dict(type="arrays", arrays=columns)
  predict = lambda variables, batch: batch["predicted"]
  return evaluating.build("box_overlap", predict, context, data=data, **options)


def test_means_and_the_picture():
  result = build([TARGET] * len(CASES), thresholds=(0.5, 0.9)).run({}, 3)
  picture = result.pop("picture")
  assert result == {
    "iou": pytest.approx((1 + 0.5 + 1 / 7) / 5, rel=1e-5),
    "acc@0.5": pytest.approx(2 / 5),
    "acc@0.9": pytest.approx(1 / 5),
  }
  assert picture.path == "boxes/val-00000003.png" or "boxes/" in picture.path


def test_an_image_without_a_box_does_not_count():
  target = np.stack([TARGET] * len(CASES))
  target[3:] = np.nan
  result = build(target, num_images=0).run({}, 1)
  assert result["iou"] == pytest.approx((1 + 0.5 + 1 / 7) / 3, rel=1e-5)
  assert "picture" not in result


def test_mistakes():
  with pytest.raises(ConfigError, match="no feature 'bok'"):
    build([TARGET] * len(CASES), target_key="bok", num_images=0).run({}, 1)
