"""Metrics of boxes, against pycocotools: golden/boxes.py."""

import importlib.util
import json
import math
import pathlib

import pytest

from bigtrain.evaluation import detection, text_metrics
from bigtrain.text import box_texts
from bigtrain.text.box_texts import Box

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "boxes.py"


@pytest.fixture(scope="module")
def pictures():
  spec = importlib.util.spec_from_file_location("boxes_golden", GOLDEN)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return list(module.pictures())


@pytest.mark.golden
def test_average_precision_is_cocos(pictures):
  samples, scores, references = zip(*pictures)
  named = [
    [[Box(*x) for x in one] for one in all_] for all_ in (samples, references)
  ]
  values = [
    detection.average_precision(*named, threshold, scores)
    for threshold in detection.THRESHOLDS
  ]
  expected = json.loads(GOLDEN.with_suffix(".json").read_text())
  assert values == pytest.approx(expected, abs=1e-9)
  assert 0 < values[-1] < 0.1 < 0.5 < values[0] < 0.9


def test_boxes_without_scores_count_together():
  right = [[Box(0, 0, 1, 1, "a")], [Box(0, 0, 1, 1, "a")]]
  given = [[Box(0, 0, 1, 1, "a")], [Box(0, 0, 0.1, 0.1, "a")]]
  for pair in ((given, right), (given[::-1], right[::-1])):
    # Half of the references are found, and half of the boxes are right: at 51
    # of the 101 recalls the precision is a half.
    assert detection.average_precision(*pair, 0.5) == pytest.approx(
      51 * 0.5 / 101
    )
    assert detection.mean_iou(*pair) == pytest.approx((1 + 0.01) / 2)


def test_each_reference_matches_once():
  right = [[Box(0, 0, 1, 0.5, "a"), Box(0, 0.5, 1, 1, "a")]]
  same = [[Box(0, 0, 1, 0.5, "a")] * 2]
  assert detection.mean_iou(same, right) == 0.5
  other = [[Box(0, 0, 1, 0.5, "b"), Box(0, 0.5, 1, 1, "a")]]
  assert detection.mean_iou(other, right) == 0.5
  assert detection.mean_iou([[]], right) == 0
  assert math.isnan(detection.mean_iou([[]], [[]]))


def test_texts_of_boxes():
  text = box_texts.spell((0.25, 0, 1.2, 0.5)) + " red cat ; "
  assert text == "<loc0256><loc0000><loc1023><loc0512> red cat ; "
  one, two = box_texts.read(text + text.replace("red", "no"))
  assert (one.label, two.label) == ("red cat", "no cat")
  assert one[:4] == (256 / 1023, 0, 1, 512 / 1023)
  assert box_texts.read("<loc0256><loc0000> cat") == []
  assert [x.label for x in box_texts.read(text[:36] + text[:36] + "dog")] == [
    "",
    "dog",
  ]


def test_boxes_of_texts():
  right = "<loc0000><loc0000><loc0500><loc1000> cat"
  near = "<loc0000><loc0000><loc0500><loc0820> cat"
  (values,) = [text_metrics.compute(["boxes"], [near], [[right]])]
  assert values == pytest.approx(
    dict(box_iou=0.82, box_ap=0.7, box_ap50=1.0, box_ap75=1.0)
  )
