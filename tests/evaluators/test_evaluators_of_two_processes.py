"""Evaluators of all features at once: two processes are one job."""

import pytest

from bigtrain import main
from bigtrain.reports import writers
from configs import digits


def evaluate(folder):
  """A part of a job of support/two_processes.py; also run by one process."""
  config = digits.get_config("runlocal")
  config.compile_cache = False
  config.eval_only = True
  config.model.depth = 1
  train, test = (
    dict(type="arrays", name="digits", split=split)
    for split in ("train", "test")
  )
  shared = dict(
    pred="pre_logits",
    pp="value_range(-1,1,0,16)|keep('image','label')",
    batch_size=160,  # The last batch is not full.
    log_steps=4,
  )
  splits = dict(data=train, test_data=test, num_examples=720)
  layers = dict(layer=["encoded", "pre_logits"])
  config.evals = dict(
    knn=dict(type="knn", k=(1, 10), top_k=(1, 3)) | splits | shared,
    linear_probe=dict(type="linear_probe", l2=(1.0, 10.0)) | splits | shared,
    cka=dict(type="cka", data=test, pred_kw=layers) | shared,
    fid=dict(type="fid", data=test, reference_data=train) | shared,
  )
  main.train(config, str(folder / "run"))


@pytest.mark.slow
def test_two_processes_evaluate_like_one(tmp_path, two_processes):
  evaluate(tmp_path)
  name = "evaluators.test_evaluators_of_two_processes.evaluate"
  (one,), (two,) = (
    writers.read_rows(str(folder / "run"))
    for folder in (tmp_path, two_processes(name).folder)
  )
  names = [x for x in one if "/" in x and not x.endswith("/secs")]
  for evaluator in ("knn", "linear_probe", "cka", "fid"):
    assert any(x.startswith(f"{evaluator}/") for x in names), names
  assert one["knn/10nn_acc"] > 0.5 and one["linear_probe/acc"] > 0.5
  assert one["fid/fid"] > 0 and 0 < one["cka/encoded:pre_logits"] < 0.999
  for name in names:
    assert two[name] == pytest.approx(one[name], rel=1e-3), name
