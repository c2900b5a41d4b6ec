"""Configs: loading, overrides, tracked reads, hints for misspelled keys."""

import json
import sys
from typing import NamedTuple

import flax.linen as nn
import ml_collections
import pytest

from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError, check_kwargs, did_you_mean
from bigtrain.config.settings import Config

# Names and keyword arguments.


def test_did_you_mean_lists_the_options_if_none_is_near():
  assert did_you_mean("zzz", ["b", "a"]) == " There are: a, b."
  assert did_you_mean("zzz", []) == ""
  many = did_you_mean("zzz", [f"n{i:02}" for i in range(30)])
  assert "n19" in many and "n20" not in many and many.endswith(" and 10 more.")


def test_did_you_mean_ignores_case():
  assert "'adamw'" in did_you_mean("adamW", ["adam", "adamw"])
  assert "'PAD'" in did_you_mean("pad", ["PAD", "past"])


def test_a_config_named_as_a_module_is_suggested(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "exp").mkdir()
  (tmp_path / "exp/mine.py").write_text("def get_config():\n  return {}\n")
  for typed in ("exp.mine", "exp/mine"):
    with pytest.raises(ConfigError, match=r"Did you mean 'exp/mine\.py'"):
      loading.load(typed)
  (tmp_path / "exp").rename(tmp_path / "configs")
  with pytest.raises(ConfigError, match=r"Did you mean 'configs/mine\.py'"):
    loading.load("mine")
  (tmp_path / "notes.md").touch()
  with pytest.raises(ConfigError, match=r"notes\.md: expected a \.py file or"):
    loading.load("notes.md")


def test_a_config_may_import_its_neighbour(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "base_of_test.py").write_text("LR = 0.25\n")
  child = tmp_path / "child.py"
  child.write_text(
    "import base_of_test\ndef get_config():\n  return {'lr': base_of_test.LR}\n"
  )
  assert loading.load(str(child)) == {"lr": 0.25}


def test_did_you_mean_suggests_the_long_form_of_an_abbreviation():
  assert "'lr_mults'" in did_you_mean("lr", ["lr_mults", "wd"])


def _function(batch, *, width, depth=2):
  del batch, width, depth


class _Module(nn.Module):
  width: int
  depth: int = 2


@pytest.mark.parametrize("fn", [_function, _Module])
def test_check_kwargs_reports_unknown_and_missing_names(fn):
  given = ("batch",)
  check_kwargs(fn, {"width": 1}, "config.model", given)
  check_kwargs(fn, {"width": 1, "depth": 1}, "config.model", given)
  with pytest.raises(
    ConfigError,
    match=r"config\.model\.dept: unknown key\. Did you mean 'depth'\?",
  ):
    check_kwargs(fn, {"width": 1, "dept": 1}, "config.model", given)
  with pytest.raises(ConfigError, match=r"config\.model\.width: missing"):
    check_kwargs(fn, {"depth": 1}, "config.model", given)


class _Numbers(NamedTuple):
  on: bool = False
  rate: float | None = None
  name: str | int = 1


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"on": "no"}, "config.x.on: expected True or False, got 'no'"),
    ({"rate": "0.1"}, "config.x.rate: expected a number, got '0.1'"),
    ([1], r"config.x: expected a dict of options, got \[1\]"),
  ],
)
def test_check_kwargs_rejects_texts_in_place_of_numbers(kwargs, message):
  check_kwargs(_Numbers, {"name": "no", "rate": None}, "config.x")
  with pytest.raises(ConfigError, match=message):
    check_kwargs(_Numbers, kwargs, "config.x")


@pytest.mark.parametrize("value", ["no", "False", "on"])
def test_words_are_no_booleans(value):
  config = settings.Config({"shuffle": value})
  with pytest.raises(ConfigError, match="config.shuffle: expected True or Fa"):
    config.get("shuffle", True)
  assert settings.Config({"cache": "~/x"}).get("cache", True) == "~/x"


def test_check_kwargs_rejects_arguments_that_the_program_passes():
  def takes_any(batch, **options):
    del batch, options

  check_kwargs(takes_any, {"anything": 1}, "config.x", ("batch",))
  with pytest.raises(ConfigError, match=r"config\.x\.batch: unknown"):
    check_kwargs(takes_any, {"batch": 1}, "config.x", ("batch",))
  with pytest.raises(ConfigError, match=r"config\.x\.batch: unknown"):
    check_kwargs(_function, {"batch": 1}, "config.x", ("batch",))


def test_check_kwargs_hides_name_and_parent_only_for_flax_modules():
  def own(name, parents=1):
    del name, parents

  check_kwargs(own, {"name": "x"}, "config.x")
  with pytest.raises(ConfigError, match="unknown"):
    check_kwargs(_Module, {"width": 1, "name": "x"}, "config.model")


# Tracked reads.


def _config():
  return Config(
    ml_collections.ConfigDict(
      dict(
        lr=1e-3,
        input=dict(batch_size=8, data=dict(name="digits", split="train")),
        evals=dict(val=dict(type="mean", log_steps=5)),
      )
    )
  )


def test_a_config_that_was_read_in_full_has_no_unread_keys():
  config = _config()
  assert config.lr == config["lr"] == config.get("lr") == 1e-3
  assert config.input.batch_size == 8
  assert config.input.kwargs("data") == {"name": "digits", "split": "train"}
  for name in config.evals:
    assert config.evals[name].type == "mean"
    assert config.evals[name].get("log_steps") == 5
  assert config.unread() == []


def test_unread_keys_are_listed_at_any_depth():
  config = _config()
  assert len(config.unread()) == 3
  assert config.lr and config.input.data.name and config.evals.val.type
  assert config.input.data.get("splits") is None
  assert config.evals.val.get("log_step") is None
  assert config.unread() == [
    "config.evals.val.log_steps: unknown key. Did you mean 'log_step'?",
    "config.input.batch_size: unknown key. There are: data.",
    "config.input.data.split: unknown key. Did you mean 'splits'?",
  ]


def test_unread_suggests_keys_that_were_read_but_are_absent():
  config = Config({"learning_rat": 1e-3, "lr_mults": []})
  assert config.get("learning_rate", 3e-4) == 3e-4
  assert "lr_mults" in config
  assert config.unread() == [
    "config.learning_rat: unknown key. Did you mean 'learning_rate'?"
  ]


def test_unread_also_suggests_keys_of_the_config():
  # The command line may misspell a key of the file.
  config = Config({"total_steps": 10, "totl_steps": 20})
  assert config.total_steps and config.get("stop_at_steps") is None
  assert config.unread() == [
    "config.totl_steps: unknown key. Did you mean 'total_steps'?"
  ]


def test_a_subtree_counts_as_read_only_if_its_keys_were_read():
  config = _config()
  assert config.lr and "input" in config and config.get("evals")
  assert [line.split(":")[0] for line in config.unread()] == [
    "config.evals.val",
    "config.input.batch_size",
    "config.input.data",
  ]


def test_a_subtree_returned_by_kwargs_counts_as_read():
  config = _config()
  assert config.lr
  config.kwargs("input")
  config.kwargs("evals")
  assert config.input.data  # A later partial read does not change that.
  assert config.unread() == []


def test_reads_return_copies():
  source = {"model": {"width": 1}}
  config = Config(source)
  config.kwargs("model")["width"] = 2
  config.to_dict()["model"]["width"] = 3
  source["model"]["width"] = 4
  assert config.model.width == 1


def test_missing_keys_are_errors_with_a_suggestion():
  config = _config()
  with pytest.raises(ConfigError, match=r"config\.task: missing\."):
    _ = config.task
  with pytest.raises(
    ConfigError,
    match=r"config\.input\.batchsize: missing \(is config\.input\.batch_size a",
  ):
    _ = config.input.batchsize
  with pytest.raises(ConfigError, match=r"config\.lr: expected a dict of"):
    config.kwargs("lr")
  assert config.kwargs("nothing") == {}
  assert config.kwargs("nothing", {"a": 1}) == {"a": 1}


def test_a_default_may_be_a_subtree():
  config = Config({"mesh": {"fsdp": 2}})
  assert config.get("input", {"shuffle": True}).shuffle is True
  assert config.get("mesh", {}).fsdp == 2
  assert config.unread() == []


def test_plain_converts_config_dicts_at_any_depth():
  value = ml_collections.ConfigDict(
    dict(a=(1, dict(b=2)), c=[ml_collections.ConfigDict(dict(d=3))])
  )
  assert settings.plain(value) == {"a": (1, {"b": 2}), "c": [{"d": 3}]}
  assert type(settings.plain(value)["c"][0]) is dict
  assert settings.plain({1: "x"}) == {"1": "x"}


# Files.


def _load(tmp_path, source, argument=""):
  path = tmp_path / "experiment.py"
  path.write_text(source)
  return loading.load(f"{path}{argument}")


def test_load_with_and_without_argument(tmp_path):
  source = "def get_config(arg=None):\n  return dict(arg=arg, n=(1, 2))\n"
  assert _load(tmp_path, source) == {"arg": None, "n": (1, 2)}
  loaded = _load(tmp_path, source, ":variant=B/16,runlocal")
  assert loaded["arg"] == "variant=B/16,runlocal"


@pytest.mark.parametrize(
  "source, argument, message",
  [
    ("x = 1", "", r"has no function get_config\(arg\)"),
    ("def get_config():\n  return {}", ":a", "takes no argument"),
    ("def get_config():\n  return 3", "", "returned no config"),
    ("def get_config(:", "", r"experiment\.py:1: SyntaxError"),
    ("import no_such", "", r"experiment\.py:1: ModuleNotFoundError: .*no_such"),
    (
      "import json\ndef get_config():\n  x = 1\n  return json.loads('{')",
      "",
      r"experiment\.py:4: JSONDecodeError: ",  # The file's line, not json's.
    ),
    (
      "def get_config():\n  raise ValueError('one\\ntwo')",
      "",
      r"experiment\.py:2: ValueError: one two$",
    ),
    ("def get_config(arg):\n  return {}", "", "TypeError: .*'arg'"),
  ],
)
def test_errors_in_a_config_file_name_its_line(
  tmp_path, source, argument, message
):
  with pytest.raises(ConfigError, match=message) as e:
    _load(tmp_path, source, argument)
  assert "\n" not in str(e.value)


def test_a_missing_file_suggests_the_nearest(tmp_path):
  (tmp_path / "digits.py").write_text("")
  with pytest.raises(ConfigError, match=r"no such file\. Did you .*digits\.py"):
    loading.load(str(tmp_path / "digit.py"))
  with pytest.raises(ConfigError, match="no such file"):
    loading.load(str(tmp_path / "nowhere" / "x.py") + ":a")


def test_a_config_error_in_the_file_is_raised_unchanged(tmp_path):
  source = """
from bigtrain.config.errors import ConfigError
def get_config():
  raise ConfigError("raised by the file")
"""
  with pytest.raises(ConfigError, match=r"^raised by the file$"):
    _load(tmp_path, source)


def test_loading_a_config_leaves_no_module_in_sys_modules(tmp_path):
  before = set(sys.modules)
  _load(tmp_path, "def get_config():\n  return {}")
  assert set(sys.modules) == before


# Overrides.

BASE = dict(
  steps=10,
  lr=1e-3,
  name="adam",
  flag=False,
  sizes=(1, 2),
  none=None,
  model=dict(width=64),
)


@pytest.mark.parametrize(
  "assignment, key, value",
  [
    ("steps=20", "steps", 20),
    ("steps=1e5", "steps", 100_000),
    ("steps=None", "steps", None),
    ("lr=3", "lr", 3.0),
    ("lr=1e-4", "lr", 1e-4),
    ("name=sgd", "name", "sgd"),
    ("name='sgd'", "name", "sgd"),
    ("name=12", "name", "12"),
    ("name=true", "name", "true"),
    ("name=False", "name", False),
    ("name=a=b", "name", "a=b"),
    ("flag=true", "flag", True),
    ("flag=False", "flag", False),
    ("flag=1", "flag", True),
    ("sizes=[3]", "sizes", (3,)),
    ("sizes=3,4", "sizes", (3, 4)),
    ("none=5", "none", 5),
    ("none=word", "none", "word"),
    ("model=[('a', None)]", "model", [("a", None)]),
    ("model={'depth': 2}", "model", {"depth": 2}),
    ("added=0.5", "added", 0.5),
  ],
)
def test_override_keeps_the_type_of_the_value(assignment, key, value):
  config = settings.plain(BASE)
  loading.override(config, assignment)
  assert config == BASE | {key: value}
  assert type(config[key]) is type(value)


def test_override_replaces_a_number_by_its_schedule_and_back():
  config = settings.plain(BASE)
  loading.override(config, "lr=dict(at_percent=[0, 9], values=[0.2, 0.1])")
  assert config["lr"] == dict(at_percent=[0, 9], values=[0.2, 0.1])
  loading.override(config, "lr=0.3")
  assert config["lr"] == 0.3


def test_override_of_nested_keys():
  config = settings.plain(BASE)
  loading.override(config, "model.width=32")
  loading.override(config, "mesh.fsdp=2")
  assert config["model"] == {"width": 32} and config["mesh"] == {"fsdp": 2}


def test_override_accepts_dicts_as_configs_write_them():
  config = {}
  loading.override(config, "data=dict(type='arrays', of=[dict(a=1), (2,)])")
  loading.override(config, "new= dict()")
  loading.override(config, "text=dict(a=print(1))")  # Calls are never made.
  assert config == {
    "data": {"type": "arrays", "of": [{"a": 1}, (2,)]},
    "new": {},
    "text": "dict(a=print(1))",
  }


@pytest.mark.parametrize(
  "assignment, message",
  [
    ("steps", r"expected --config\.steps=VALUE"),
    ("steps=0.5", r"--config\.steps=0\.5: expected int, as in 10"),
    ("steps=many", "expected int"),
    ("steps=true", "expected int"),
    ("steps=1e999", "expected int"),
    ("lr=fast", r"--config\.lr=fast: expected float, as in 0\.001"),
    ("lr=True", "expected float"),
    ("lr={[]: 1}", "expected float"),
    ("lr={'peak': 1}", "expected float"),
    ("flag=maybe", "expected bool"),
    ("flag=2", "expected bool"),
    ("sizes=3", "expected tuple"),
    ("model=3", "expected dict"),
    ("lr.x=3", r"--config\.lr\.x: config\.lr is 0\.001, not a dict"),
    ("model.width.x=3", r"config\.model\.width is 64, not a dict"),
  ],
)
def test_override_rejects_wrong_types_and_paths(assignment, message):
  config = settings.plain(BASE)
  with pytest.raises(ConfigError, match=message):
    loading.override(config, assignment)
  assert config == BASE


REFERENCES = """
import ml_collections
def get_config():
  c = ml_collections.ConfigDict()
  c.total_steps = 10
  c.ckpt_steps = c.get_ref("total_steps")
  c.half = c.get_ref("total_steps") // 2
  c.model = dict(widths=(8, 16), layers=[1], name="vit", rate=0.5)
  c.none = None
  c.lock()
  return c
"""


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ((), {}),
    (["total_steps=6"], dict(total_steps=6, ckpt_steps=6, half=3)),
    (["total_steps=1e2"], dict(total_steps=100, ckpt_steps=100, half=50)),
    (["none=3", "added=(1,2)"], dict(none=3, added=(1, 2))),
    (["total_steps=None"], dict(total_steps=None, ckpt_steps=None)),
    (["model={'depth': 2}"], dict(model=dict(depth=2))),
    (["hooks={'a': {'plan': {2: 1}}}"], dict(hooks=dict(a={"plan": {"2": 1}}))),
    (["evals.val.log_steps=5"], dict(evals=dict(val=dict(log_steps=5)))),
  ],
)
def test_changes_reach_references_and_new_keys(tmp_path, changes, expected):
  path = tmp_path / "experiment.py"
  path.write_text(REFERENCES)
  loaded = loading.load(str(path), changes)
  base = dict(total_steps=10, ckpt_steps=10, half=5, none=None)
  base["model"] = dict(widths=(8, 16), layers=[1], name="vit", rate=0.5)
  if loaded["total_steps"] is None:
    loaded["half"] = 5
  assert loaded == base | expected


def test_changes_of_a_config_dict_keep_types(tmp_path):
  path = tmp_path / "experiment.py"
  path.write_text(REFERENCES)
  nested = ["model.widths=[3]", "model.layers=(2,)", "model.name=3"]
  model = loading.load(str(path), [*nested, "model.rate=1"])["model"]
  assert model == dict(widths=(3,), layers=[2], name="3", rate=1.0)
  assert type(model["widths"]) is tuple and type(model["rate"]) is float
  for change, message in (
    ("total_steps=0.5", "expected int"),
    ("model=3", "expected dict"),
    ("none.x=3", "config.none is None, not a dict"),
  ):
    with pytest.raises(ConfigError, match=message):
      loading.load(str(path), [change])


def test_the_config_of_a_run_is_a_config(tmp_path):
  path = tmp_path / "config.json"
  path.write_text('{"lr": 0.1, "model": {"width": 8}}')
  loaded = loading.load(str(path), ["model.width=16"])
  assert loaded == {"lr": 0.1, "model": {"width": 16}}
  path.write_text("[1]")
  with pytest.raises(ConfigError, match=r"config\.json: expected a dict"):
    loading.load(str(path))
  with pytest.raises(ConfigError, match=r"no such file.*config\.json"):
    loading.load(str(tmp_path / "confg.json"))


# JSON and digests.


def test_json_and_digest_do_not_depend_on_the_order_of_keys():
  config = ml_collections.ConfigDict(dict(b=(1, 2), a=dict(c=None)))
  assert json.loads(settings.to_json(config)) == {"a": {"c": None}, "b": [1, 2]}
  same = {"b": (1, 2), "a": {"c": None}}
  assert settings.digest(config) == settings.digest(same)
  assert settings.digest(config) != settings.digest(same | {"b": (1, 3)})
  assert "float" in settings.to_json({"dtype": float})
