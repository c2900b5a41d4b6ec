"""Inputs with ids beyond the model's vocabulary are refused."""

import pytest

from bigtrain import main
from bigtrain.inputs import vocabulary
from bigtrain.pp import parse, registry
from bigtrain.settings import ConfigError
from configs import digits_captions


def test_sizes_come_from_source_and_ops():
  class Source:
    vocab_sizes = {"tokens": 300, "labels": 7}

  op = registry.compose(parse.parse("tokenize(max_len=8)"))
  sizes = vocabulary.sizes(op, Source)
  assert sizes == {"tokens": 300, "labels": 259}
  assert vocabulary.sizes(registry.compose([]), object()) == {}
  vocabulary.check(sizes, {"labels": 259, "other": 1}, "config.input")
  with pytest.raises(ConfigError, match=r"\.input: .*'tokens' go up to 299"):
    vocabulary.check(sizes, {"tokens": 299}, "config.input")


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
