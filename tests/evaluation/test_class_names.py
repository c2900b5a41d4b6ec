"""Class names as tokens."""

import numpy as np
import pytest
from tiny import evaluating

from bigtrain.evaluation import class_names
from bigtrain.pp import tokenizers
from bigtrain.pp.class_names import fill
from bigtrain.settings import ConfigError

TOKENIZE = "tokenize(max_len=12)"


def ids(text):
  row = np.zeros(12, np.int32)
  encoded = [*tokenizers.get("bytes").encode(text), 2]
  row[: len(encoded)] = encoded
  return row


def test_a_prompt_is_filled_with_each_name():
  texts = fill("see {}!", ["a", "b"], "key")
  tokens = class_names.tokens(texts, TOKENIZE, evaluating.context(), key="key")
  np.testing.assert_array_equal(tokens, [ids("see a!"), ids("see b!")])
  assert tokens.dtype == np.int32


def test_ids_beyond_the_models_vocabulary_are_refused():
  small = evaluating.context(vocab_sizes={"labels": 100})
  with pytest.raises(ConfigError, match=r"pp_text.*vocabulary has 100"):
    class_names.tokens(["a"], TOKENIZE, small, key="config.evals.val.pp_text")
