"""Mistakes in a config end in one line, before anything compiles or is written.

These tests run the whole program on one mistake of each kind. The tests of each
module cover the other mistakes.
"""

import re

import jax
import numpy as np
import pytest

from bigtrain import main
from bigtrain.config.errors import ConfigError

_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
  """Names of the functions that XLA compiles, or reads from its cache."""
  names = []

  def listen(event, secs, **kwargs):
    if event == _COMPILED:
      names.append(kwargs.get("fun_name", "?"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def refuse(config, workdir, compilations, message):
  """Asserts that training ends in an error before it compiles or writes."""
  with pytest.raises(ConfigError) as error:
    main.train(config, str(workdir))
  text = str(error.value)
  assert re.search(message, text), text
  assert "\n" not in text
  assert not workdir.exists()
  assert not compilations


def test_the_fixture_sees_a_compilation(compilations):
  jax.jit(lambda x: x + 3.5)(np.zeros(7)).block_until_ready()
  assert compilations


_AXES = dict(rows=("replica", "fsdp"), pixels=None, hidden="fsdp", classes=None)


def _axes(rules, **model):
  """Changes to a model that names its axes, with rules for them."""
  model = dict(num_classes=10, **model)
  return {"model_name": "tiny.axes", "model": model, "logical_axes": rules}


def _vit(**fields):
  return dict(
    num_classes=10, width=16, depth=2, num_heads=2, patch_size=4, **fields
  )


# None removes the key that a misspelled one replaces.
MISSPELLED = [
  # At the top.
  ({"seed": None, "sed": 1}, r"config.sed: .* mean 'seed'"),
  ({"evals": None, "evls": {}}, r"config.evls: .* mean 'evals'"),
  ({"log_steps": None, "log_stps": 1}, r"config.log_stps: .* 'log_steps'"),
  ({"schedule": None, "shedule": {}}, r"config.shedule: .* mean 'schedule'"),
  ({"keep_ckpt": 3}, r"config.keep_ckpt: .* mean 'keep_ckpts'"),
  ({"grad_clip_nrm": 1.0}, r"config.grad_clip_nrm: .* 'grad_clip_norm'"),
  ({"num_epochs": 3}, r"config.num_epochs: .* mean 'total_epochs'"),
  ({"batch_size": 4}, r"config.batch_size: .* mean 'config.input.batch_size'"),
  ({"batch_siz": 4}, r"config.batch_siz: .* mean 'config.input.batch_size'"),
  ({"warmup_percent": 4}, r"mean 'config.schedule.warmup_steps'"),
  ({"learning_rate": 1.0}, r"config.learning_rate: .* mean 'lr'"),
  ({"num_classes": 4}, r"classes: .* mean 'config.model.num_classes'"),
  # Required keys.
  (
    {"total_steps": None, "log_steps": 2},
    r"config.total_steps: missing; give",
  ),
  ({"total_steps": None, "totl_steps": 6}, r"config.total_steps.*totl_steps"),
  ({"task": None, "tsk": "x"}, r"config.task: missing .is config.tsk a mis"),
  ({"input": None, "inputs": {}}, r"config.input: missing .is config.inputs"),
  ({"lr": None, "lrr": 0.1}, r"config.lr: missing .is config.lrr"),
  (
    {"optimizer": None, "optimzer": dict(name="adam")},
    r"config.optimizer.*config.optimzer",
  ),
  (
    {"input.batch_size": None, "input.batchsize": 16},
    r"config.input.batch_size: missing .is config.input.batchsize",
  ),
  # In a subtree.
  ({"input.shufle": True}, r"config.input.shufle: .* mean 'shuffle'"),
  ({"input.data.pth": "x"}, r"config.input.data.pth: .* mean 'path'"),
  ({"mesh": dict(replca=1)}, r"config.mesh.replca: .* mean 'replica'"),
  ({"model.widht": 3}, r"config.model.widht: .* mean 'width'"),
  ({"loss": dict(knd="x")}, r"config.loss.knd: .* mean 'kind'"),
  ({"optimizer.b11": 0.9}, r"config.optimizer.b11: .* mean 'b1'"),
  (
    {"schedule.warmup_steps": None, "schedule.warmup_stps": 2},
    r"config.schedule.warmup_stps: .* mean 'warmup_steps'",
  ),
  ({"watchdog": dict(stp_secs=9)}, r"config.watchdog.stp_secs: .*'step_secs'"),
  # In an evaluator.
  (
    {"evals.vall": dict(num_examples=5)},
    r"config.evals.vall: has no type and no pred. Did you mean 'val'",
  ),
  ({"evals.val.topk": [1]}, r"config.evals.val.topk: .* mean 'top_k'"),
  ({"evals.val.wieghts": "ema"}, r"evals.val.wieghts: .* mean 'weights'"),
  ({"evals.val.enabld": True}, r"evals.val.enabld: .* mean 'enabled'"),
  (
    {"evals.val.log_steps": None, "evals.val.log_stps": 2},
    r"config.evals.val.log_stps: .* mean 'log_steps'",
  ),
  (
    {"evals.val.log_steps": None, "evals.val.log_epoch": 2},
    r"config.evals.val.log_epoch: .* mean 'log_epochs'",
  ),
  (
    {"evals.val.pred": None, "evals.val.prd": "logits"},
    r"config.evals.val.pred: missing.*prd",
  ),
  ({"evals.val.pred_kw": dict(knd=1)}, r"evals.val.pred_kw.knd: unknown key"),
  ({"evals.val.data.pth": "x"}, r"evals.val.data.pth: .* mean 'path'"),
  ({"evals.val.data.typ": "x"}, r"evals.val.data.typ: .* mean 'type'"),
  # In a hook.
  (
    {"hooks": dict(e=dict(type="early_stopping", metrc="loss"))},
    r"config.hooks.e.metrc: .* mean 'metric'",
  ),
]


UNKNOWN = [
  ({"task": "clasification"}, r"config.task: .* mean 'classification'"),
  ({"task": "nobody.knows"}, r"config.task: cannot import 'nobody.knows'"),
  ({"model_name": "vitt"}, r"config.model_name: .* mean 'vit'"),
  ({"model_name": "tiny.nt"}, r"config.model_name: cannot import 'tiny.nt'"),
  ({"loss": dict(kind="softmax_xnt")}, r"config.loss.kind: .*'softmax_xent'"),
  ({"input.data.type": "arays"}, r"config.input.data.type: .* mean 'arrays'"),
  ({"input.pp": "random_crp(8)"}, r"input.pp: .*op 1.* mean 'random_crop'"),
  ({"input.pp": "random_crop(8,pda=1)"}, r"input.pp: .*'pda'.* mean 'pad'"),
  (
    {"pp_modules": ("tiny.ops",), "input.pp": "drop('id')"},
    r"config.pp_modules: cannot import 'tiny.ops'",
  ),
  ({"optimizer.name": "adma"}, r"config.optimizer.*'adma'.* mean 'adam'"),
  ({"optimizer.name": "adm"}, r"config.optimizer.*'adm'.* mean 'adam'"),
  ({"schedule.decay_type": "cosin"}, r"decay_type: .* mean 'cosine'"),
  ({"sharding": [(".*", "fsd")]}, r"config.sharding.0.: .* mean 'fsdp'"),
  ({"nonfinite": "skp"}, r"config.nonfinite: .* mean 'skip'"),
  ({"weight_stats": "globl"}, r"config.weight_stats: .* mean 'global'"),
  ({"evals.val.type": "mea"}, r"config.evals.val.type: .* mean 'mean'"),
  ({"evals.val.pred": "logit"}, r"config.evals.val.pred: .* mean 'logits'"),
  ({"evals.val.weights": "ema"}, r"evals.val.weights: .* no 'ema'.*params"),
  ({"evals.val.data.type": "arrys"}, r"val.data.type: .* mean 'arrays'"),
  ({"evals.val.pp": "kep('id')"}, r"config.evals.val.pp: .* mean 'keep'"),
  ({"hooks": dict(e=dict(type="early_stoping"))}, r"hooks.e.type: .*stopping"),
  (
    {"hooks": dict(e=dict(type="call", function="tiny.hooks.nothing"))},
    r"config.hooks.*tiny.hooks has no 'nothing'",
  ),
]

UNFIT = [
  (
    {"input.pp": "onehot(12,key='labels')|keep('image','labels')"},
    r"config.model.num_classes: expected 12, .*, got 10",
  ),
  ({"evals.val.loss": "softmax_xnt"}, r"evals.val.loss: .* 'softmax_xent'"),
  ({"evals.val.data.path": "x.npz"}, r"val.data.path: /.*/x.npz: no such file"),
  (
    {"microbatches": 2, "microbatch_examples": 8},
    r"config.microbatches and config.microbatch_examples: give only one",
  ),
  ({"microbatch_examples": 12}, r"microbatch_examples=12 .* 8 devices"),
  ({"mesh": dict(pipeline=2)}, r"pipeline=2: tiny.net has no .* param_dims"),
  (
    {"mesh": dict(pipeline=2), "model_name": "vit", "model": _vit()},
    r"config.mesh.pipeline=2: .* no loop .* config.model.scan=True",
  ),
  (
    {"mesh": dict(pipeline=4), "model_name": "vit", "model": _vit(scan=True)},
    r"config.mesh.pipeline=4 does not divide .* is 2\).*: 1 and 2",
  ),
  (
    {
      "mesh": dict(pipeline=2, pipeline_rounds=2),
      "model_name": "vit",
      "model": _vit(scan=True),
    },
    r"config.mesh.pipeline_rounds=2: expected a multiple of 4 layers.* got 2",
  ),
  (
    {
      "mesh": dict(pipeline=2, pipeline_microbatches=6),
      "model_name": "vit",
      "model": _vit(scan=True),
    },
    r"config.mesh.pipeline_microbatches=6 does not divide",
  ),
  ({"loss_scale": dict(ini=1.0)}, r"config.loss_scale.ini: .* 'init'"),
  (
    {"eager": True, "debug_nans": True},
    r"config.eager=True and config.debug_nans=True",
  ),
  ({"input.batch_size": 12}, r"config.input.batch_size=12 .* nearest .* 8 and"),
  (
    {"input.batch_size": "x"},
    r"config.input.batch_size: expected a whole number at least 1",
  ),
  ({"evals.val.batch_size": 12}, r"config.evals.val.batch_size=12 .* 8 and"),
  ({"microbatches": 4}, r"config.microbatches=4: .* nearest .* is 2"),
  ({"mesh": dict(replica=3)}, r"config.mesh: replica=3 .* devices is 8"),
  ({"input.data.slice": "[:0]"}, r"config.input.data: .*no example"),
  ({"input.data.path": "x.npz"}, r"config.input.data: .*x.npz.*no such file"),
  ({"evals.val.batch_size": 0}, r"val.batch_size: expected .* at least 1"),
  ({"evals.val.num_examples": -1}, r"num_examples: expected .* at least 1"),
  ({"peak_flops_per_device": "x"}, r"peak_flops_per_device: expected a number"),
  ({"sharding": "replicated"}, r"config.sharding: .* list .* 'replicated'"),
  ({"teacher": "x"}, r"config.teacher: expected a dict .* 'x'"),
  (
    {"ema_decay": 0.9, "ema_start_percent": 200},
    r"config.ema_start_percent: expected .* at most 100, got 200",
  ),
  ({"evals.val": 3}, r"config.evals.val: expected a dict"),
  ({"total_epochs": 2}, r"total_steps and config.total_epochs: give .* once"),
  ({"total_steps": 0}, r"config.total_steps"),
  ({"stop_at_steps": "x"}, r"config.stop_at_steps: expected a number"),
  ({"seed": "x"}, r"config.seed: expected a whole number"),
  ({"lr": "x"}, r"config.lr: expected a number"),
  ({"keep_ckpts": -1}, r"config.keep_ckpts: expected .* at least 0"),
  ({"schedule.warmup_steps": 9}, r"config.schedule: warm-up of 9 .* run of 6"),
  (
    {"sharding": [("params/head/bias", "shard_dim(0)")]},
    r"params/head/bias.*8",
  ),
  (_axes(dict(_AXES, hidden="fsd")), r"logical_axes.hidden: .* mean 'fsdp'"),
  (_axes([("rows",)]), r"config.logical_axes: expected a dict or .*'rows'"),
  (_axes(dict(_AXES, rows=None), rows="row"), r"'row', .* mean 'rows'"),
  (_axes({}), r"config.logical_axes: expected a rule for 'pixels'"),
  (
    _axes(dict(rows=None, pixels=None, hidden=None, clases=None)),
    r"rule for 'classes', an axis of params/head/kernel, .* mean 'clases'",
  ),
  (
    _axes(dict(_AXES, classes="fsdp", hidden=None)),
    r"params/head/kernel: dimension 1 \('classes'\) .* 10, .* fsdp = 8",
  ),
  ({"input.pp": "drop('labels')"}, r"input: .*no feature 'labels'.* id, image"),
  ({"input.pp": "drop('image')"}, r"input: .*no feature 'image'.* id, labels"),
]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(changes, message, id="-".join(changes))
    for changes, message in MISSPELLED + UNKNOWN + UNFIT
  ],
)
def test_mistakes_are_errors_before_anything_compiles(
  tiny_config, tmp_path, compilations, changes, message
):
  config = tiny_config(changes)
  refuse(config, tmp_path / "run", compilations, message)


def test_an_empty_file_is_an_error(tiny_config, tmp_path, compilations):
  np.savez(tmp_path / "empty.npz", image=np.zeros((0, 8, 8, 1), np.float32))
  config = tiny_config({"input.data.path": str(tmp_path / "empty.npz")})
  refuse(config, tmp_path / "run", compilations, r"input.data: .*no example")


def test_all_unknown_keys_are_reported_at_once(
  tiny_config, tmp_path, compilations
):
  config = tiny_config({"keep_ckpt": 1, "input.shufle": True})
  message = r"config.input.shufle: .* config.keep_ckpt: "
  refuse(config, tmp_path / "run", compilations, message)


def test_a_correct_config_trains(tiny_config, tmp_path, compilations):
  main.train(tiny_config({"stop_at_steps": 1}), str(tmp_path / "run"))
  assert compilations
