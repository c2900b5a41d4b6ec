"""Examples learn what their headers promise."""

import json
import pathlib

import pytest

from bigtrain import main
from bigtrain.config import loading

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def train(name, workdir, **changes):
  name, _, arguments = name.partition(":")
  config = loading.load(f"{CONFIGS / name}.py:{arguments}")
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
def test_features_of_mae_are_better_than_pixels(tmp_path):
  """Before random pixels; seeds 0 to 2 have 0.82 to 0.83, pixels 0.69."""
  newest = train("mae:runlocal", tmp_path)
  assert newest["knn/20nn_acc"] >= 0.78
  assert newest["pixels/20nn_acc"] <= 0.72


@pytest.mark.results
def test_features_of_dino_are_better_than_pixels_and_random_ones(tmp_path):
  """At random places; seeds 0 to 2: 0.76 to 0.80, pixels 0.51, random 0.57."""
  newest = train("dinov2:runlocal", tmp_path, eval_at_start=True)
  first = (tmp_path / "metrics.jsonl").read_text().partition("\n")[0]
  untrained = json.loads(first)
  assert untrained["step"] == 0
  for features in ("knn", "student"):
    assert newest[f"{features}/20nn_acc"] >= 0.72
    assert untrained[f"{features}/20nn_acc"] <= 0.62
  assert newest["pixels/20nn_acc"] <= 0.54


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
