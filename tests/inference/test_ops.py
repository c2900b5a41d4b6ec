"""Which ops new pictures and texts get."""

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.inference import ops

IMAGE = "decode|resize(8)"


def config(evals=(), **input_options):
  return {
    "evals": dict(evals),
    "input": {"data": {"type": "arrays"}, **input_options},
  }


def entry(pred, pp):
  return dict(type="mean", pred=pred, data={}, pp=pp)


@pytest.mark.parametrize(
  "arguments, key, spec",
  [
    # The preferred predict function, then the order of names.
    ({}, "config.evals.b.pp", "decode|resize(8)|value_range"),
    (dict(evaluation="a"), "config.evals.a.pp", "decode|resize(4)"),
    (dict(given="resize(9)"), "pp", "resize(9)"),
  ],
)
def test_the_order_of_the_places(arguments, key, spec):
  run = config(
    {
      "a": entry("loss", "decode|resize(4)|keep('image')"),
      "b": entry("logits", f"{IMAGE}|value_range|onehot(3)|keep('image')"),
      "c": entry("logits", "decode"),
    }
  )
  chain = ops.find(run, "image", ["logits"], **arguments)
  assert (chain.key, chain.spec, chain.raw) == (key, spec, "image")


def test_ops_of_labels_are_left_out_and_their_files_not_needed():
  pp = f"lookup('gone.txt',key='name',key_result='labels')|{IMAGE}"
  run = config({"val": entry("logits", pp)})
  assert ops.find(run, "image", []).spec == IMAGE
  chain = ops.find(run, "labels", [])
  with pytest.raises(ConfigError, match=r"no such file.*gone.txt"):
    chain.needs.ops[0].fn({"name": b"x"}, None)


def test_the_ops_of_training_if_they_draw_no_random_numbers():
  run = config(pp=f"{IMAGE}|choice(key='captions',key_result='text')")
  assert ops.find(run, "image", []).key == "config.input.pp"
  mixture = {"x": dict(data={}, pp="resize(3)")}
  run = {"input": {"mixture": mixture, "pp": "resize(5)"}}
  assert ops.find(run, "image", []).spec == "resize(3)"
  run = config(pp="decode|inception_crop(8)|flip_lr")
  with pytest.raises(ConfigError) as e:
    ops.find(run, "image", [])
  assert str(e.value) == (
    "bigtrain.load: the run has no ops that make 'image' of new data: "
    "config.input.pp draws random numbers (decode|inception_crop(8), flip_lr). "
    "Give pp=..., such as 'decode|resize(224)|value_range(-1,1)'."
  )


def test_evaluations_without_images_are_passed_over():
  run = config({"a": entry("perplexity", "keep('labels')")}, pp=IMAGE)
  assert ops.find(run, "image", []).key == "config.input.pp"


def test_ops_of_texts():
  tokenize = "tokenize(max_len=9)"
  choice = "choice(key='all',key_result='text')"
  run = config(pp=f"{IMAGE}|{choice}|{tokenize}|keep('image','labels')")
  chain = ops.find_text(run, "labels", [])
  assert (chain.spec, chain.raw) == (f"{choice}|{tokenize}", "all")
  run["evals"]["z"] = dict(pred="embed", pp_text=f"lower|{tokenize}", data={})
  assert ops.find_text(run, "labels", []).spec == f"lower|{tokenize}"
  assert ops.find_text(run, "labels", [], tokenize).key == "pp_text"


def test_options_and_names_of_evaluations():
  run = config({"a": dict(pred="caption", pred_kw=dict(method="beam"))})
  assert ops.pred_kw(run, "caption", None) == {"method": "beam"}
  assert ops.pred_kw(run, "caption", "b") == ops.pred_kw(run, "x", None) == {}
  with pytest.raises(ConfigError, match="no evaluation of the run has them"):
    ops.evaluated_names(run)
