"""Inputs with ids or class numbers that the model cannot take are refused."""

import numpy as np
import pytest
import tiny
from support import processes
from support.array_inputs import fetch, make_eval, make_train, rows_of

from bigtrain import main
from bigtrain.arrays.types import ClassCount
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import checks
from bigtrain.pp import parse, registry
from configs import digits_captions

# The source does not know what these ops make of its labels.
HIDDEN = (
  "value_range(0,1,0,1,key='labels')|cast('int32',key='labels')"
  "|keep('image','labels')"
)


def test_sizes_come_from_source_and_ops():
  class Source:
    vocab_sizes = {"tokens": 300, "labels": 7}

  op = registry.compose(parse.parse("tokenize(max_len=8)"))
  sizes = checks.sizes(op, Source)
  assert sizes == {"tokens": 300, "labels": 259}
  assert checks.sizes(registry.compose([]), object()) == {}
  checks.check_sizes(sizes, {"labels": 259, "other": 1}, "config.input")
  with pytest.raises(ConfigError, match=r"\.input: .*'tokens' go up to 299"):
    checks.check_sizes(sizes, {"tokens": 299}, "config.input")


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path):
  def refused(config, match):
    with pytest.raises(ConfigError, match=match):
      main.train(config, str(tmp_path / "run"))
    # Refused before anything is written or compiled.
    assert not (tmp_path / "run").exists()

  config = digits_captions.get_config("runlocal")
  config.model.vocab_size = 100
  refused(
    config,
    r"config\.input: the ids of 'labels' go up to 258, but the model's "
    "vocabulary has 100 entries: give config.model a vocabulary of at least "
    "259, or",
  )
  config = digits_captions.get_config("runlocal")
  config.input.pp = config.input.pp.replace("'bytes'", "'byte'")
  refused(config, r"config\.input\.pp: .*tokenize.*Did you mean 'bytes'")


def spoilt(tiny_config, folder, split="train", changes=None, **labels):
  """A config of data with other labels: row_55=12 is label 12 in row 55."""
  config = tiny_config()
  data = config["input"]["data"] if split == "train" else None
  data = data or config["evals"]["val"]["data"]
  with np.load(data["path"]) as file:
    arrays = dict(file)
  for row, label in labels.items():
    arrays["labels"][int(row.removeprefix("row_"))] = label
  path = str(folder / f"{split}.npz")
  np.savez(path, **arrays)
  key = "input.data.path" if split == "train" else "evals.val.data.path"
  return tiny_config({key: path, "input.shuffle": False, **(changes or {})})


@pytest.mark.parametrize(
  ("label", "changes", "message"),
  [
    (10, {}, r"train\.npz, row 55: the class number 'labels' is 10, but "
     r"config\.model\.num_classes=10 allows 0 to 9\.$"),
    (-1, {}, r"train\.npz, row 55: the class number 'labels' is -1, but "),
    (9, {"model.num_classes": 5}, r"train\.npz, row \d+: .* is \d, but "
     r"config\.model\.num_classes=5 allows 0 to 4\.$"),
    (10, {"input.cache": "raw"}, r"train\.npz, row 55: .* is 10, but"),
    (10, {"input.pp": "copy('labels','x')|copy('x','labels')|drop('x')"},
     r"train\.npz, row 55: .* is 10, but"),
  ],
)  # fmt: skip
def test_labels_that_the_source_knows_are_checked_at_the_start(
  tiny_config, tmp_path, label, changes, message
):
  config = spoilt(tiny_config, tmp_path, changes=changes, row_55=label)
  with pytest.raises(DataError, match=r"^config\.input: /.*" + message):
    main.train(config, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_labels_are_checked_in_their_batch(tiny_config, tmp_path):
  config = spoilt(
    tiny_config, tmp_path, changes={"input.pp": HIDDEN}, row_55=-3
  )
  path = tmp_path / "config.py"
  path.write_text(f"def get_config():\n  return {config!r}\n")
  command = processes.main_command(path, tmp_path / "run")
  ended = processes.run(command, devices=8)
  assert ended.returncode == 2
  assert ended.stderr.strip().splitlines()[-1] == (
    f"error: config.input: {tmp_path}/train.npz, row 55: the class number "
    "'labels' is -3, but config.model.num_classes=10 allows 0 to 9."
  )
  # Row 55 is in the fourth batch, and the checkpoint before it stays.
  assert tiny.checkpoint_steps(tmp_path / "run") == [3]
  # Such an example can be left out like one that is damaged.
  config["input"]["skip_errors"] = 1
  main.train(config, str(tmp_path / "run"))
  assert tiny.checkpoint_steps(tmp_path / "run")[-1] == 6


@pytest.mark.parametrize("pp", ["", HIDDEN])
def test_labels_of_evaluations_are_checked(tiny_config, tmp_path, pp):
  changes = {"evals.val.pp": pp}
  config = spoilt(tiny_config, tmp_path, "val", changes, row_3=10, row_5=-1)
  message = (
    r"^config\.evals\.val: /.*val\.npz, row 3: .* is 10, but "
    r"config\.model\.num_classes=10"
  )
  with pytest.raises(DataError, match=message):
    main.train(config, str(tmp_path / "run"))
  # To this evaluator, a negative label means that there is none.
  config = spoilt(tiny_config, tmp_path, "val", changes, row_5=-1)
  assert np.isfinite(main.train(config, str(tmp_path / "good"))["val/loss"])
  changes |= {"evals.val.type": "mean", "evals.val.pred": "loss"}
  config = spoilt(tiny_config, tmp_path, "val", changes, row_5=-1)
  with pytest.raises(DataError, match=r"val\.npz, row 5: .* is -1, but"):
    main.train(config, str(tmp_path / "run2"))


def test_more_classes_than_the_data_have_are_a_warning(caplog):
  for count, warnings in ((16, 0), (18, 1)):
    caplog.clear()
    train_input = make_train(pp="", data=rows_of(16))
    train_input.limit_ids({"label": ClassCount(count)})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
  assert "16 classes" in messages[0]
  assert "config.model.num_classes=18" in messages[0]


def test_labels_of_another_type_are_refused(tiny_config, tmp_path):
  config = tiny_config({"input.pp": "cast('float32',key='labels')"})
  message = (
    r"config\.input\.pp: feature 'labels' is float32, but class numbers are "
    r"integers; cast\('int32', key='labels'\) converts them\."
  )
  with pytest.raises(ConfigError, match=message):
    main.train(config, str(tmp_path))


def test_only_integers_of_a_limited_feature_are_limited():
  classes = ClassCount(10)
  hot = np.eye(64, 12, dtype=np.int32) * 99
  for data in (rows_of(64, hot=hot), rows_of(64, hot=hot.astype(np.float32))):
    train = make_train("keep('hot')", data=data)
    train.limit_ids({"hot": classes, "other": 3})
    fetch(train.start(0, 4))
    assert train.unlimited == []
  train = make_train("keep('hot')", data=rows_of(64, hot=hot))
  train.limit_ids({"hot": 50})
  with pytest.raises(DataError, match="row .*: 'hot' contains the id 99, but"):
    fetch(train.start(0, 4))
  assert make_train("keep('label')", data=rows_of(64)).unlimited == ["label"]
  with pytest.raises(DataError, match="row 10: .*'label' is 10, but config.x"):
    make_eval().limit_ids({"label": ClassCount(10, "config.x")})


def test_ids_of_a_source_are_followed_through_ops():
  class Source:
    vocab_sizes = {"label": 7, "tokens": 300}

  def sizes(spec):
    return checks.sizes(registry.compose(parse.parse(spec)), Source)

  both = {"label": 7, "tokens": 300}
  assert sizes("copy('label','labels')|keep('labels')") == {"labels": 7, **both}
  assert sizes("cast('int32',key='label')") == both
  assert sizes("onehot(9,key='label')") == {"tokens": 300}
  assert sizes("onehot(9,key='label',key_result='x')") == both
  assert sizes("onehot(9,'label')|copy('label','x')") == {"tokens": 300}
  # An op that does not declare what it sets.
  assert sizes("test_widen|keep('label')") == {}


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3)])
def test_the_first_wrong_row(dtype, shape):
  ids = np.arange(np.prod(shape)).reshape(shape).astype(dtype) % 7
  find = checks.find_invalid
  assert find(ids, 7) is None and find(ids, 300) is None
  wrong = np.argwhere(ids.reshape(6, -1) >= 6)
  assert find(ids, 6) == (wrong[0, 0] if len(wrong) else None)
  assert find(ids[:0], 1) is None
  if np.dtype(dtype).kind == "i":
    ids[4] = -1
    assert find(ids, 7) == 4 and find(ids, 300) == 4
    assert find(ids, 7, negative=True) is None
