"""Examples learn what their headers promise."""

import pathlib

import pytest

from bigtrain import main
from bigtrain.config import loading

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def train(name, workdir, **changes):
  config = loading.load(str(CONFIGS / f"{name}.py"))
  config.update(changes)
  return main.train(config, str(workdir))


@pytest.mark.results
def test_pydoc_lm_reaches_its_bits_per_byte(tmp_path):
  newest = train("pydoc_lm", tmp_path)
  assert newest["val/bits_per_byte"] <= 1.60


@pytest.mark.results
def test_a_model_of_answers_learns_which_of_two_is_preferred(tmp_path):
  newest = train("sft", tmp_path / "sft")
  assert newest["val/accuracy"] >= 0.57
  newest = train("dpo", tmp_path / "dpo", model_init=str(tmp_path / "sft"))
  assert newest["val/accuracy"] >= 0.85
  assert newest["val/loss"] <= 0.40


@pytest.mark.results
def test_the_quickstarts_classifier_recognises_samples_of_jit(tmp_path):
  train("digits", tmp_path / "digits")
  config = loading.load(
    f"{CONFIGS / 'jit.py'}:runlocal,judge={tmp_path / 'digits'}"
  )
  newest = main.train(config, str(tmp_path / "jit"))
  assert newest["recognised/acc"] >= 0.95
  assert newest["recognised/acc_worst_class"] >= 0.9
  assert newest["fid/fid"] <= 1.5
