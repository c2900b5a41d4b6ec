"""Mistakes in an objective have their line before anything compiles."""

import jax
import numpy as np
import pytest

from bigtrain import main
from bigtrain.config.errors import ConfigError

ONE = dict(type="classification", weight=1.0)
OPTIMIZER = dict(optimizer=dict(name="adam"), lr=0.01)
NO_OPTIMIZER = dict.fromkeys(("optimizer", "lr", "schedule"))
CROPS = {
  "large_crops": np.zeros((16, 2, 8, 8, 1)),
  "small_crops": np.zeros((16, 3, 4, 4, 1)),
}
DINO = {
  "task": "dinov2",
  "model_name": "dinov2",
  "model": dict(
    variant="mu/2",
    posemb="sincos2d",
    num_prototypes=8,
    head_hidden=16,
    head_out=8,
  ),
  "evals": {},
}


def optimizers(**params):
  entries = {name: OPTIMIZER | dict(params=x) for name, x in params.items()}
  return NO_OPTIMIZER | {"optimizers": entries}


MISTAKES = {
  "a task without a weight": (
    {"task": {"a": dict(type="classification")}},
    "config.task.a.weight: missing",
  ),
  "a negative weight": (
    {"task": {"a": ONE | dict(weight=-1.0)}},
    r"config.task.a.weight: expected a number above 0, got -1",
  ),
  "a step beyond the run": (
    {"task": {"a": ONE, "b": ONE | dict(from_steps=9)}},
    "config.task.b: begins at step 9, but the run has 6 steps",
  ),
  "a metric that an evaluation writes too": (
    {"task": {"val": ONE}},
    "config.task.val and config.evals.val: both would write",
  ),
  "a metric that the program writes too": (
    {"task": {"lr": ONE}},
    "config.task.lr: expected another name; lr/.* are metrics",
  ),
  "features that the input does not make": (
    {"task": {"a": ONE | dict(features=dict(image="picture"))}},
    "config.task.a.features.image: config.input makes no feature 'picture'",
  ),
  "a teacher with other parameters": (
    {"task": "tiny.following", "loss": dict(teacher_has="others")},
    "config.loss: the teacher has another/.*the student has no such parameter",
  ),
  "a teacher with other shapes": (
    {"task": "tiny.following", "loss": dict(teacher_has="larger")},
    "config.loss: the teacher's head/.* has the shape",
  ),
  "optimizers that overlap": (
    optimizers(a=".*", b="head/.*"),
    "head/bias belongs to a and b",
  ),
  "optimizers that leave a parameter out": (
    optimizers(a="first/.*"),
    "no optimizer has head/bias, head/kernel",
  ),
  "more crops than the batch holds": (
    DINO
    | {
      "loss": dict(num_small=4),
      "input.data": dict(type="arrays", arrays=CROPS),
    },
    "config.loss.num_small=4: more than the 3 small crops that the batch",
  ),
}


@pytest.mark.parametrize("mistake", [*MISTAKES])
def test_mistakes_have_their_line(tiny_config, tmp_path, monkeypatch, mistake):
  def compile_any(*_):
    raise AssertionError("a program is compiled")

  monkeypatch.setattr(jax.stages.Lowered, "compile", compile_any)
  changes, message = MISTAKES[mistake]
  with pytest.raises(ConfigError, match=message):
    main.train(tiny_config(changes), str(tmp_path))
  assert not list(tmp_path.iterdir())
