"""Names of the classes of training and evaluations, compared at the start."""

import jax
import numpy as np
import pytest
from tiny import evaluating

from bigtrain.arrays.types import ClassCount
from bigtrain.config import lengths, settings
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations
from bigtrain.inputs import labels
from bigtrain.text import tokenizers

PP = "decode|resize(6)|copy('label','labels')|keep('image','labels')"


def make_folder(top, *names):
  for name in names:
    (top / name).mkdir(parents=True)
  return dict(type="image_folder", path=str(top))


def check(train, val, kind="classification", **options):
  """Checks an evaluation on `val` after training on `train`.

  Training that knows no names, such as that of an earlier version, has None.
  """
  entry = dict(type=kind, pred="predict", data=val, pp=PP, **options)
  names = {}
  if train:
    names["labels"] = labels.of_source(train, PP, (), "labels", "config.input")
  evaluations.from_config(
    settings.Config({"evals": {"val": entry}}),
    {"predict": lambda variables, batch: batch},
    lengths.Units(batch_size=8, total_steps=1),
    evaluating.context(
      name="",
      vocab_sizes={"labels": ClassCount(9, "model.num_classes")},
      class_names=names,
    ),
    {"params": jax.ShapeDtypeStruct((), "float32")},
  )


@pytest.mark.parametrize("kind", ["classification", "mean"])
def test_other_class_folders_are_an_error_unless_the_config_allows_them(
  tmp_path, kind
):
  train = make_folder(tmp_path / "train", "bird", "cat", "dog")
  val = make_folder(tmp_path / "val", "cat", "dog", "fox")
  with pytest.raises(ConfigError) as error:
    check(train, val, kind)
  message = str(error.value)
  assert message.startswith("config.evals.val.data: its classes differ")
  assert "only config.input has 'bird'; only config.evals.val has 'fox'" in (
    message
  )
  assert "config.evals.val.trust_class_numbers=True" in message
  check(train, val, kind, trust_class_numbers=True)
  check(train, train, kind)


def test_a_file_of_classes_gives_both_the_same_numbers(tmp_path):
  train = make_folder(tmp_path / "train", "bird", "cat", "dog")
  val = make_folder(tmp_path / "val", "cat", "dog")
  with pytest.raises(ConfigError, match=r"only config\.input has 'bird'\. "):
    check(train, val)
  names = tmp_path / "names.txt"
  names.write_text("bird\ncat\ndog\n")
  check(train, val | dict(classes=str(names)))
  names.write_text("cat\nbird\ndog\n")
  with pytest.raises(ConfigError, match=r"class 0 is 'cat' here and 'bird' th"):
    check(train, val | dict(classes=str(names)))


def test_data_without_names_is_not_compared(tmp_path):
  val = make_folder(tmp_path / "val", "cat")
  check(None, val)
  check(dict(type="arrays", arrays=dict(label=[0])), val)


def test_a_message_lists_a_few_names():
  names = [f"n{i}" for i in range(9)]
  with pytest.raises(ConfigError, match="has 'n2', .* 'n6' and 2 more;"):
    labels.check_same([*"ab"], names[2:], "config.evals.val")
  with pytest.raises(ConfigError, match="has 3 names, config.input 2"):
    labels.check_same(["a", "b", "b"], ["a", "b"], "config.evals.val")


TOKENIZE = "tokenize(max_len=12)"


def ids(text):
  row = np.zeros(12, np.int32)
  encoded = [*tokenizers.get("bytes").encode(text), 2]
  row[: len(encoded)] = encoded
  return row


def test_a_prompt_is_filled_with_each_name():
  texts = labels.fill("see {}!", ["a", "b"], "key")
  tokens = labels.tokens(texts, TOKENIZE, (), {}, key="key")
  np.testing.assert_array_equal(tokens, [ids("see a!"), ids("see b!")])
  assert tokens.dtype == np.int32


def test_ids_beyond_the_models_vocabulary_are_refused():
  small = evaluating.context(vocab_sizes={"labels": 100}, name="val")
  with pytest.raises(ConfigError, match=r"pp_text.*vocabulary has 100"):
    evaluations.class_tokens(["a"], TOKENIZE, small)
