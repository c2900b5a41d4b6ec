"""Makes boxes.json: COCO's average precisions, by pycocotools.

  python tests/golden/boxes.py

tests/evaluation/test_detection.py computes the same from the same boxes.
"""

import json
import pathlib
import random

PATH = pathlib.Path(__file__).with_suffix(".json")
LABELS = ("cat", "dog", "owl")


def pictures():
  """Yields (predicted boxes, their scores, right boxes) of pictures.

  Boxes are (top, left, bottom, right, label).
  """
  draw = random.Random(0)

  def box():
    top, left = draw.uniform(0, 0.6), draw.uniform(0, 0.6)
    size = draw.uniform(0.1, 0.4), draw.uniform(0.1, 0.4)
    return [top, left, top + size[0], left + size[1], draw.choice(LABELS)]

  def near(other):
    moved = [min(max(x + draw.gauss(0, 0.012), 0), 1) for x in other[:4]]
    label = other[4] if draw.random() < 0.8 else draw.choice(LABELS)
    return [*moved, label]

  for _ in range(30):
    right = [box() for _ in range(draw.randrange(5))]
    predicted = [near(x) for x in right if draw.random() < 0.8]
    predicted += [near(x) for x in right if draw.random() < 0.3]
    predicted += [box() for _ in range(draw.randrange(2))]
    yield predicted, [draw.random() for _ in predicted], right


def main():
  from pycocotools import coco, cocoeval

  def entry(number, picture, box, **others):
    top, left, bottom, right, label = box
    width, height = right - left, bottom - top
    return dict(
      id=number,
      image_id=picture,
      category_id=LABELS.index(label) + 1,
      bbox=[left, top, width, height],
      area=width * height,
      iscrowd=0,
      **others,
    )

  truth, found = [], []
  data = list(pictures())
  for i, (predicted, scores, right) in enumerate(data, start=1):
    truth += [entry(len(truth) + 1 + j, i, x) for j, x in enumerate(right)]
    found += [entry(0, i, x, score=s) for x, s in zip(predicted, scores)]
  gold = coco.COCO()
  gold.dataset = dict(
    info={},
    images=[dict(id=i + 1) for i in range(len(data))],
    categories=[dict(id=i + 1, name=x) for i, x in enumerate(LABELS)],
    annotations=truth,
  )
  gold.createIndex()
  evaluation = cocoeval.COCOeval(gold, gold.loadRes(found), "bbox")
  evaluation.params.areaRng = [[0, 1e10]]
  evaluation.params.areaRngLbl = ["all"]
  evaluation.evaluate()
  evaluation.accumulate()
  # [thresholds, recalls, labels, areas, numbers of detections].
  precision = evaluation.eval["precision"][:, :, :, 0, -1]
  PATH.write_text(json.dumps(precision.mean(axis=(1, 2)).tolist()) + "\n")


if __name__ == "__main__":
  main()
