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

CROPPED = DINO | {"input.data": dict(type="arrays", arrays=CROPS)}


def schedule(*values, at_steps=(0, 3)):
  return dict(at_steps=[*at_steps], values=[*values], shape="stair")


def optimizers(**params):
  entries = {name: OPTIMIZER | dict(params=x) for name, x in params.items()}
  return NO_OPTIMIZER | {"optimizers": entries}


MISTAKES = {
  "a task without a weight": (
    {"task": {"a": dict(type="classification")}},
    "config.task.a.weight: missing",
  ),
  "a misspelled name of a task": (
    {"task": {"first": ONE, "frist": dict(weight=0.5)}},
    "config.task.frist.type: missing. Did you mean 'first'",
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
    CROPPED | {"loss": dict(num_small=4)},
    "config.loss.num_small=4: more than the 3 small crops that the batch",
  ),
  "an option for crops that the input makes": (
    CROPPED | {"loss": dict(large_area=(0.2, 1.0))},
    "config.loss.large_area=.*no effect, because config.input.pp makes the "
    "feature 'large_crops'",
  ),
  "shares in the wrong order": (
    DINO | {"loss": dict(small_area=(0.5, 0.1))},
    "config.loss.small_area: expected two ascending shares",
  ),
  "copies without a Gram teacher": (
    DINO | {"loss": dict(gram_copies=1)},
    "config.loss.gram_copies: expected a gram_weight",
  ),
  "an option out of its limits": (
    DINO | {"loss": dict(momentum=1.5)},
    "config.loss.momentum: expected a number at least 0 and at most 1, got 1.5",
  ),
  "a schedule out of the limits": (
    DINO | {"loss": dict(student_temperature=schedule(0.1, 0.0))},
    r"config.loss.student_temperature.values\[1\]: expected a number above 0",
  ),
  "a misspelled key of a schedule": (
    DINO | {"loss": dict(momentum=dict(at_percnt=[0], values=[0.9]))},
    "config.loss.momentum.at_percnt: unknown key. Did you mean 'at_percent'",
  ),
  "a schedule that begins after the run": (
    DINO | {"loss": dict(momentum=dict(at_steps=[7, 9], values=[0.9, 1.0]))},
    "momentum.at_steps: a value changes at step 7, but the run has 6 steps",
  ),
  "a jump after the run": (
    DINO | {"loss": dict(momentum=schedule(0.9, 1.0, at_steps=[0, 7]))},
    "momentum.at_steps: a value changes at step 7, but the run has 6 steps",
  ),
  "a schedule of a number that all steps share": (
    {"task": {"a": ONE | dict(loss=dict(label_smoothing=schedule(0.1, 0.0)))}},
    "config.task.a.loss.label_smoothing: expected one number for all steps",
  ),
  "a schedule of a switch": (
    DINO | {"loss": dict(flip=schedule(1, 0))},
    "config.loss.flip: the loss needs one number for all steps",
  ),
  "a wrong option of one of several tasks": (
    {"task": {"a": ONE | dict(loss=dict(label_smoothing=2.0))}},
    "config.task.a.loss.label_smoothing: expected a number at least 0",
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
