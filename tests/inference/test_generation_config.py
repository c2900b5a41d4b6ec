"""generation_config.json: the keys that are computed, and a warning for others.

tests/text/test_decoding.py compares what they do with transformers.
"""

import pytest

from bigtrain.inference import generation_config

PATH = "model/generation_config.json"


def options(given, task="language_modeling"):
  return generation_config.options(PATH, given, 7, task)


def test_rules_for_the_next_token_are_options():
  rules = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [5, 9],
    "begin_suppress_tokens": [2],
    "bad_words_ids": [[4], [1, 3]],
  }
  given = rules | {"min_new_tokens": 4, "eos_token_id": [7, 8]}
  assert options(given) == rules | {"min_new": 4, "eos_id": [7, 8]}
  assert options({}) == {"eos_id": 7}


# Values of the library's GenerationConfig that change nothing.
DEFAULTS = {
  "num_beams": 1,
  "length_penalty": 1.0,
  "early_stopping": False,
  "diversity_penalty": 0.0,
  "guidance_scale": 1.0,
  "encoder_repetition_penalty": 1.0,
  "encoder_no_repeat_ngram_size": 0,
  "typical_p": 1.0,
  "epsilon_cutoff": 0.0,
  "eta_cutoff": 0.0,
  "num_return_sequences": 1,
  "min_length": 0,
  "token_healing": False,
  "suppress_tokens": [],
  "bad_words_ids": None,
  "forced_eos_token_id": None,
  "renormalize_logits": True,
  "max_new_tokens": 99,
  "transformers_version": "5.23.0",
}


@pytest.mark.parametrize("do_sample", [False, True])
def test_values_that_change_nothing_say_nothing(do_sample, caplog):
  options(DEFAULTS | {"do_sample": do_sample})
  assert not caplog.messages


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("num_beams", 4),
    ("guidance_scale", 1.5),
    ("sequence_bias", [[[3], -2.0]]),
    ("encoder_repetition_penalty", 1.1),
    ("encoder_no_repeat_ngram_size", 3),
    ("exponential_decay_length_penalty", [5, 1.1]),
    ("forced_bos_token_id", 3),
    ("forced_eos_token_id", 0),
    ("min_length", 20),
    ("stop_strings", ["\n\n"]),
    ("num_return_sequences", 3),
    ("penalty_alpha", 0.6),
  ],
)
def test_a_key_that_is_not_computed_is_named(name, value, caplog):
  assert options({name: value}) == {"eos_id": 7}
  (message,) = caplog.messages
  assert message.startswith(f"{PATH}: {name}={value!r} is ignored; ")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("typical_p", 0.9),
    ("epsilon_cutoff", 3e-4),
    ("eta_cutoff", 3e-4),
    ("top_h", 0.4),
  ],
)
def test_keys_of_sampling_matter_only_in_sampling(name, value, caplog):
  options({name: value})
  assert not caplog.messages
  options({name: value, "do_sample": True, "penalty_alpha": 0.6})
  (message,) = caplog.messages
  assert f": {name}={value!r} is ignored; " in message


def test_the_least_length_of_a_seq2seq_model_counts_its_first_token(caplog):
  assert options({"min_length": 5}, "seq2seq") == {"eos_id": 7, "min_new": 4}
  assert not caplog.messages
