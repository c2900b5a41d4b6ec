"""LocCa's sequences against ones written by hand, and boxes of all formats."""

import numpy as np
import pytest

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import digit_pairs
from bigtrain.pp import parse, registry

FIRST, BINS = 259, 1024
# Of the tokenizer "bytes".
EOS, PAD = 2, 0
BOX = np.array([0.25, 0.1, 0.5, 1.0], np.float32)
# round(share * 1023): big_vision's refcoco_mask2str, and PaliGemma's tokens.
LOCATIONS = [FIRST + 256, FIRST + 102, FIRST + 512, FIRST + 1023]


def ids(text):
  return [3 + byte for byte in text.encode()]


def row(length, *parts, given=0):
  whole = [x for part in parts for x in part] + [EOS]
  padding = [PAD] * (length - len(whole))
  mask = [0] * given + [1] * (len(whole) - given) + [0] * len(padding)
  return whole + padding, mask


def run(spec, features, u=0.0):
  op = registry.compose(parse.parse(spec))
  return op.fn(features, np.full(op.draws, u, np.float32))


def example(**changes):
  return {
    "text": b"a dog and a cat",
    "boxes": np.stack([BOX, BOX[[0, 1, 0, 1]]]),
    "box_texts": np.array([b"a dog", b"a cat"], object),
  } | changes


def test_sequences_and_masks_are_those_of_the_paper():
  result = run("locca(259, max_len=32)", example())
  expected = [
    row(32, ids("cap:"), ids("a dog and a cat"), given=4),
    row(32, ids("aref:"), ids("a dog"), LOCATIONS, given=5),
    row(32, ids("gcap:"), LOCATIONS, ids("a dog"), given=5),
  ]
  labels, masks = zip(*expected)
  np.testing.assert_array_equal(result["locca"], labels)
  np.testing.assert_array_equal(result["locca_masks"], masks)
  assert result["locca"].dtype == np.int32


def test_the_loss_may_be_on_the_answer_alone():
  result = run("locca(259, max_len=32, loss_on='answer')", example())
  _, aref = row(32, ids("aref:a dog"), LOCATIONS, given=10)
  _, gcap = row(32, ids("gcap:"), LOCATIONS, ids("a dog"), given=9)
  np.testing.assert_array_equal(result["locca_masks"][1:], [aref, gcap])


def test_a_number_chooses_the_box_and_no_box_leaves_padding():
  spec = "locca(259, max_len=32, tasks=('gcap',))"
  second = run(spec, example(), u=0.99)["locca"][0]
  assert second[9:14].tolist() == ids("a cat")
  empty = example(boxes=np.zeros((0, 4)), box_texts=np.array([], object))
  result = run("locca(259, max_len=32)", empty)
  assert result["locca"][0, 0] == ids("c")[0]
  assert not result["locca"][1:].any() and not result["locca_masks"][1:].any()


def test_a_long_text_is_cut_so_that_the_box_fits():
  long = example(box_texts=np.array([b"x" * 90, b""], object))
  result = run("locca(259, max_len=20)", long)
  aref, gcap = result["locca"][1:]
  assert aref[-5:].tolist() == [*LOCATIONS, EOS]
  assert aref[:15].tolist() == ids("aref:" + "x" * 10)
  assert gcap.tolist() == [*ids("gcap:"), *LOCATIONS, *ids("x" * 10), EOS]


def test_numbers_of_classes_have_names():
  spec = "locca(259, max_len=32, names=('a dog', 'a cat'))"
  numbered = run(spec, example(box_texts=np.array([0, 1])))
  named = run("locca(259, max_len=32)", example())
  np.testing.assert_array_equal(numbered["locca"], named["locca"])


@pytest.mark.parametrize("index", [0, 1])
def test_batches_and_tensors_give_the_same(index):
  tf = pytest.importorskip("tensorflow")
  op = registry.compose(parse.parse("locca(259, max_len=32)"))
  source = digit_pairs.Source(length=40, margin=1, boxes=True)
  rows = source.read(np.arange(40))
  u = hashing.uniforms(0, 0, np.arange(40), op.draws)
  batch = op.fn(rows, u)
  assert len({tuple(x) for x in batch["locca"][:, 1]}) > 30
  alone = op.fn({name: x[index] for name, x in rows.items()}, u[index])
  tensors = {
    name: tf.constant(rows[name][index])
    for name in ("text", "boxes", "box_texts")
  }
  graph = op.fn(tensors, tf.constant(u[index]))
  for name in ("locca", "locca_masks"):
    np.testing.assert_array_equal(batch[name][index], alone[name])
    np.testing.assert_array_equal(graph[name].numpy(), alone[name])


def test_boxes_of_digits_hold_the_digits():
  source = digit_pairs.Source(length=200, margin=2, boxes=True)
  rows = source.read(np.arange(200))
  height, width = rows["image"].shape[1:3]
  inside = np.zeros((200, height, width), bool)
  for i, boxes in enumerate(rows["boxes"]):
    for top, left, bottom, right in np.rint(
      boxes * [height, width, height, width]
    ).astype(int):
      assert bottom - top == right - left == 8
      inside[i, top:bottom, left:right] = True
  assert not rows["image"][..., 0][~inside].any()
  assert rows["box_texts"][73].tolist() == [b"a seven", b"a three"]


@pytest.mark.parametrize(
  "task, prompt",
  [
    ("cap", ids("cap:")),
    ("aref", ids("aref:a cat")),
    ("gcap", [*ids("gcap:"), *(FIRST + b for b in (256, 102, 256, 102))]),
  ],
)
def test_questions_are_the_beginnings_of_the_sequences(task, prompt):
  spec = f"locca_question(259, {task!r}, max_len=32, index=1)"
  result = run(spec, example())
  assert result["prompt"][: len(prompt)].tolist() == prompt
  assert not result["prompt"][len(prompt) :].any()
  if task != "cap":
    np.testing.assert_array_equal(result["box"], BOX[[0, 1, 0, 1]])
    assert result["box_text"] == b"a cat"


def test_a_question_about_a_missing_box_has_no_answer():
  result = run("locca_question(259, 'aref', index=2)", example())
  assert np.isnan(result["box"]).all() and result["box_text"] == b""
  assert result["prompt"].tolist()[:6] == [*ids("aref:"), 0]


@pytest.mark.parametrize(
  "spec, box",
  [
    ("boxes('yxyx')", [10, 40, 30, 80]),
    ("boxes('xyxy')", [40, 10, 80, 30]),
    ("boxes('xywh')", [40, 10, 40, 20]),
    ("boxes('xywh', pixels=False)", [0.2, 0.1, 0.2, 0.2]),
  ],
)
def test_boxes_of_other_formats(spec, box):
  tf = pytest.importorskip("tensorflow")
  image = np.zeros((100, 200, 3), np.uint8)
  rows = {"image": image, "boxes": np.array([box], np.float32)}
  expected = [[0.1, 0.2, 0.3, 0.4]]
  np.testing.assert_allclose(run(spec, rows)["boxes"], expected, rtol=1e-6)
  graph = run(spec, {name: tf.constant(x) for name, x in rows.items()})
  np.testing.assert_allclose(graph["boxes"], expected, rtol=1e-6)


@pytest.mark.parametrize(
  "spec, changes, error, message",
  [
    ("locca(258)", {}, ConfigError, "'first_location' is 258.* 259 or more"),
    ("locca(259, max_len=9)", {}, ConfigError, "'max_len'"),
    ("locca(259, tasks=('car',))", {}, ConfigError, "tasks.*'cap'"),
    ("locca(259, loss_on='all')", {}, ConfigError, "loss_on"),
    (
      "locca(259)",
      dict(boxes=np.array([[10, 40, 30, 80]])),
      DataError,
      "has 1 boxes, but 'box_texts' has 2",
    ),
    (
      "locca(259)",
      dict(boxes=np.array([[10, 40, 30, 80]] * 2)),
      DataError,
      r"box \[10.0.* from 0 to 1",
    ),
    (
      "locca(259)",
      dict(box_texts=np.array([b" ", b" "], object)),
      DataError,
      "text without a token",
    ),
    ("locca(259)", dict(box_texts=[0, 1]), ConfigError, "argument names"),
    ("boxes('xyx')", {}, ConfigError, "'xyxy'"),
  ],
)
def test_mistakes_have_their_line(spec, changes, error, message):
  with pytest.raises(error, match=message):
    run(spec, example(**changes))
