"""Pairs of answers in the source of supervised texts."""

import json

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.data.formats import pydoc_questions

_ROWS = [
  {"prompt": "ab", "chosen": "cd", "rejected": "efg"},
  {"prompt": "hij", "chosen": "k", "rejected": "l"},
  {"chosen": "mn", "rejected": "o"},
]


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "pairs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
  return str(path)


def source(path, **options):
  return supervised.Source("bytes", 8, path, preferences=True, **options)


def test_both_answers_follow_the_prompt(path):
  pairs = source(path, bos=False)
  assert len(pairs) == 3
  assert pairs.spec["tokens"][1] == (2, 8)
  batch = pairs.read(np.array([1, 0]))
  coder = pairs._coder
  want = [[b"hijk", b"hijl"], [b"abcd", b"abefg"]]
  for b in range(2):
    for answer in range(2):
      ids = batch["tokens"][b, answer]
      n = len(want[b][answer])
      np.testing.assert_array_equal(
        ids[:n], coder.encode(want[b][answer].decode())
      )
      first = len(_ROWS[1 - b]["prompt"])
      mask = batch["loss_mask"][b, answer]
      np.testing.assert_array_equal(np.flatnonzero(mask), range(first - 1, n))
  assert pairs.where(1).startswith(path)


def test_a_row_without_an_answer_is_named(tmp_path):
  path = tmp_path / "pairs.jsonl"
  path.write_text('{"prompt": "a", "chosen": "b", "rejectd": "c"}\n')
  with pytest.raises(DataError, match="Did you mean 'rejectd'"):
    source(str(path))


def test_a_pair_with_a_long_answer_is_dropped_whole(path):
  pairs = source(path, bos=False, too_long="drop")
  assert len(pairs) == 3
  short = supervised.Source(
    "bytes", 4, path, preferences=True, bos=False, too_long="drop"
  )
  assert len(short) == 2
  tokens = short.read(np.array([0]))["tokens"][0, :, :3]
  np.testing.assert_array_equal(*tokens)  # Of the second row.


def test_packing_is_refused(path):
  with pytest.raises(
    ConfigError, match="preferences=True: expected pack=False"
  ):
    source(path, pack=True)


def test_a_detail_of_pythons_documentation_is_the_worse_answer():
  rows = {
    split: [row for _, row in pydoc_questions.rows(split, preferences=True)]
    for split in ("train", "test")
  }
  assert len(rows["train"]) > 9 * len(rows["test"]) > 900
  assert not {row["prompt"] for row in rows["train"]} & {
    row["prompt"] for row in rows["test"]
  }
  by_name = {row["prompt"].partition("(")[0]: row for row in rows["train"]}
  row = by_name["queue.Queue.task_done"]
  assert row["chosen"] == "Indicate that a formerly enqueued task is complete."
  assert row["rejected"] == "Used by Queue consumer threads."
