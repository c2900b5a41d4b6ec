"""Configs: what is misspelled is told, at any depth, with the right name."""

import json
import math
import sys

import flax.linen as nn
import ml_collections
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain import lengths, parts, settings
from bigtrain.lengths import Units
from bigtrain.settings import Config, ConfigError

# Names and keyword arguments.


def test_did_you_mean_falls_back_on_a_list_of_what_there_is():
  assert settings.did_you_mean("zzz", ["b", "a"]) == " There are: a, b."
  assert settings.did_you_mean("zzz", []) == ""
  many = settings.did_you_mean("zzz", [f"n{i:02}" for i in range(30)])
  assert "n19" in many and "n20" not in many and many.endswith("...")


def test_did_you_mean_finds_abbreviations():
  assert "'lr_mults'" in settings.did_you_mean("lr", ["lr_mults", "wd"])


def _function(batch, *, width, depth=2):
  del batch, width, depth


class _Module(nn.Module):
  width: int
  depth: int = 2


@pytest.mark.parametrize("fn", [_function, _Module])
def test_check_kwargs(fn):
  given = ("batch",)
  settings.check_kwargs(fn, {"width": 1}, "config.model", given)
  settings.check_kwargs(fn, {"width": 1, "depth": 1}, "config.model", given)
  with pytest.raises(
    ConfigError,
    match=r"config\.model\.dept: unknown key\. Did you mean 'depth'\?",
  ):
    settings.check_kwargs(fn, {"width": 1, "dept": 1}, "config.model", given)
  with pytest.raises(ConfigError, match=r"config\.model\.width: missing"):
    settings.check_kwargs(fn, {"depth": 1}, "config.model", given)


def test_check_kwargs_refuses_what_the_program_passes_itself():
  def takes_any(batch, **options):
    del batch, options

  settings.check_kwargs(takes_any, {"anything": 1}, "config.x", ("batch",))
  with pytest.raises(ConfigError, match=r"config\.x\.batch: unknown"):
    settings.check_kwargs(takes_any, {"batch": 1}, "config.x", ("batch",))
  with pytest.raises(ConfigError, match=r"config\.x\.batch: unknown"):
    settings.check_kwargs(_function, {"batch": 1}, "config.x", ("batch",))


def test_check_kwargs_hides_only_flax_own_fields():
  def own(name, parents=1):
    del name, parents

  settings.check_kwargs(own, {"name": "x"}, "config.x")
  with pytest.raises(ConfigError, match="unknown"):
    settings.check_kwargs(_Module, {"width": 1, "name": "x"}, "config.model")


# find_module and find_attribute.


def test_find_module_by_name():
  module = parts.find_module("tasks", "classification", "config.task")
  assert module.__name__ == "bigtrain.tasks.classification"


@pytest.mark.parametrize(
  "name, message",
  [
    ("clasification", "config.task: no tasks module 'clasification'.*Did you"),
    ("zzz", "There are: .*classification"),
    ("no_such_package.task", "no module named 'no_such_package'"),
    ("json.no_such_module", "no module named 'json.no_such_module'"),
    (".task", "expected package.module, got '.task'"),
    ("task.", "expected package.module"),
    ("", "expected a module's name, got ''"),
    (3, "expected a module's name, got 3"),
  ],
)
def test_find_module_refuses(name, message):
  with pytest.raises(ConfigError, match=message):
    parts.find_module("tasks", name, "config.task")


def test_find_module_outside_of_the_package(tmp_path, monkeypatch):
  package = tmp_path / "my_project_of_test"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "good.py").write_text("answer = 42")
  (package / "broken.py").write_text("import no_such_dependency")
  monkeypatch.syspath_prepend(str(tmp_path))
  found = parts.find_module("tasks", "my_project_of_test.good", "config.task")
  assert found.answer == 42
  # The user's own broken import is told as itself, not as a missing task.
  with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
    parts.find_module("tasks", "my_project_of_test.broken", "config.task")


def test_find_attribute():
  assert parts.find_attribute("math.pi", "config.x") == math.pi
  with pytest.raises(
    ConfigError, match=r"config\.x: math has no 'sqrtt'.*sqrt"
  ):
    parts.find_attribute("math.sqrtt", "config.x")
  with pytest.raises(ConfigError, match=r"expected package\.module\.name"):
    parts.find_attribute("pi", "config.x")


# Reads are tracked.


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


def test_a_config_that_is_read_has_nothing_unread():
  config = _config()
  assert config.lr == config["lr"] == config.get("lr") == 1e-3
  assert config.input.batch_size == 8
  assert config.input.kwargs("data") == {"name": "digits", "split": "train"}
  for name in config.evals:
    assert config.evals[name].type == "mean"
    assert config.evals[name].get("log_steps") == 5
  assert config.unread() == []


def test_unread_keys_are_found_at_any_depth():
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


def test_unread_suggests_what_was_asked_for_and_not_there():
  config = Config({"learning_rat": 1e-3, "lr_mults": []})
  assert config.get("learning_rate", 3e-4) == 3e-4
  assert "lr_mults" in config
  assert config.unread() == [
    "config.learning_rat: unknown key. Did you mean 'learning_rate'?"
  ]


def test_unread_also_suggests_what_the_config_already_has():
  # As when the command line misspells a key of the file.
  config = Config({"total_steps": 10, "totl_steps": 20})
  assert config.total_steps and config.get("stop_at_steps") is None
  assert config.unread() == [
    "config.totl_steps: unknown key. Did you mean 'total_steps'?"
  ]


def test_a_subtree_that_is_only_seen_is_not_read():
  config = _config()
  assert config.lr and "input" in config and config.get("evals")
  assert [line.split(":")[0] for line in config.unread()] == [
    "config.evals.val",
    "config.input.batch_size",
    "config.input.data",
  ]


def test_a_subtree_handed_out_whole_stays_read():
  config = _config()
  assert config.lr
  config.kwargs("input")
  config.kwargs("evals")
  assert config.input.data  # A look at it afterwards changes nothing.
  assert config.unread() == []


def test_reading_hands_out_copies():
  source = {"model": {"width": 1}}
  config = Config(source)
  config.kwargs("model")["width"] = 2
  config.to_dict()["model"]["width"] = 3
  source["model"]["width"] = 4
  assert config.model.width == 1


def test_missing_keys():
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


def test_plain():
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
  return settings.load(f"{path}{argument}")


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
def test_mistakes_in_a_file_name_its_line(tmp_path, source, argument, message):
  with pytest.raises(ConfigError, match=message) as e:
    _load(tmp_path, source, argument)
  assert "\n" not in str(e.value)


def test_a_missing_file_names_the_nearest(tmp_path):
  (tmp_path / "digits.py").write_text("")
  with pytest.raises(ConfigError, match=r"no such file\. Did you .*digits\.py"):
    settings.load(str(tmp_path / "digit.py"))
  with pytest.raises(ConfigError, match="no such file"):
    settings.load(str(tmp_path / "nowhere" / "x.py") + ":a")


def test_a_config_error_of_the_file_is_told_as_it_is(tmp_path):
  source = """
from bigtrain.settings import ConfigError
def get_config():
  raise ConfigError("told by the file")
"""
  with pytest.raises(ConfigError, match=r"^told by the file$"):
    _load(tmp_path, source)


def test_loading_leaves_no_module_behind(tmp_path):
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
    ("model={'depth': 2}", "model", {"depth": 2}),
    ("added=0.5", "added", 0.5),
  ],
)
def test_override(assignment, key, value):
  config = settings.plain(BASE)
  settings.override(config, assignment)
  assert config == BASE | {key: value}
  assert type(config[key]) is type(value)


def test_override_at_depth():
  config = settings.plain(BASE)
  settings.override(config, "model.width=32")
  settings.override(config, "mesh.fsdp=2")
  assert config["model"] == {"width": 32} and config["mesh"] == {"fsdp": 2}


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
    ("flag=maybe", "expected bool"),
    ("flag=2", "expected bool"),
    ("sizes=3", "expected tuple"),
    ("model=3", "expected dict"),
    ("lr.x=3", r"--config\.lr\.x: config\.lr is 0\.001, no dict"),
    ("model.width.x=3", r"config\.model\.width is 64, no dict"),
  ],
)
def test_override_refuses(assignment, message):
  config = settings.plain(BASE)
  with pytest.raises(ConfigError, match=message):
    settings.override(config, assignment)
  assert config == BASE


# Units.

UNITS = Units(
  batch_size=1024,
  examples_per_epoch=1_281_167,
  tokens_per_example=256,
  total_steps=112_603,
)


@pytest.mark.parametrize(
  "key, amount, expected",
  [
    ("total_steps", 100, 100),
    ("total_epochs", 90, 112_603),  # 90 * 1281167 / 1024 = 112602.57
    ("total_epochs", 0.5, 626),
    ("total_examples", 1024 * 7, 7),
    ("total_examples", 1, 1),  # At least one step,
    ("total_examples", 0, 0),  # but nothing stays nothing.
    ("total_tokens", 1024 * 256 * 3, 3),
    ("total_percent", 10, 11_260),
    ("total_percent", 100, 112_603),
  ],
)
@pytest.mark.parametrize("tracked", [True, False])
def test_steps_in_every_unit(key, amount, expected, tracked):
  source = {key: amount, "other": 1}
  cfg = Config(source) if tracked else source
  assert lengths.steps(cfg, "total", UNITS) == expected
  if tracked:
    assert [line.split(":")[0] for line in cfg.unread()] == ["config.other"]
  else:
    assert cfg == {"other": 1}


@pytest.mark.parametrize("tracked", [True, False])
def test_steps_without_a_key(tracked):
  def make(source):
    return Config(source) if tracked else source

  assert lengths.steps(make({}), "log", UNITS) is None
  assert lengths.steps(make({}), "log", UNITS, default=50) == 50
  assert lengths.steps(make({"log_steps": None}), "log", UNITS, 50) == 50
  # Another unit on the command line, in place of the config's own.
  both = make({"log_epochs": None, "log_steps": 3})
  assert lengths.steps(both, "log", UNITS) == 3
  assert not tracked or both.unread() == []


def test_all_units_are_known_names():
  config = Config({"total_epoch": 90})
  assert lengths.steps(config, "total", UNITS) is None
  assert config.unread() == [
    "config.total_epoch: unknown key. Did you mean 'total_epochs'?"
  ]


@pytest.mark.parametrize(
  "source, units, message",
  [
    (
      {"log_steps": 1, "log_epochs": 1},
      UNITS,
      r"config\.x\.log_steps and config\.x\.log_epochs: give the length once",
    ),
    ({"log_steps": -1}, UNITS, r"config\.x\.log_steps: .* at least 0, got -1"),
    ({"log_epochs": math.inf}, UNITS, "finite"),
    ({"log_epochs": math.nan}, UNITS, "finite"),
    ({"log_steps": "10"}, UNITS, "expected a number, got '10'"),
    ({"log_steps": True}, UNITS, "expected a number, got True"),
    ({"log_epochs": 1}, Units(8), "needs a training set of known size"),
    ({"log_tokens": 1}, Units(8), "needs an input with tokens"),
    ({"log_percent": 1}, Units(8), "needs the length of the run"),
  ],
)
def test_steps_refuses(source, units, message):
  with pytest.raises(ConfigError, match=message):
    lengths.steps(Config(source, "config.x"), "log", units)
  with pytest.raises(ConfigError, match=message):
    lengths.steps(dict(source), "log", units, path="config.x")


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_whole_steps_survive_every_unit(num_steps, batch_size):
  units = Units(batch_size, examples_per_epoch=batch_size, tokens_per_example=7)
  for unit, each in [
    ("examples", 1),
    ("epochs", 1 / batch_size),
    ("tokens", 7),
  ]:
    amount = num_steps * batch_size * each
    assert units.to_steps(amount, unit, "key") == num_steps


# JSON and digests.


def test_json_and_digest():
  config = ml_collections.ConfigDict(dict(b=(1, 2), a=dict(c=None)))
  assert json.loads(settings.to_json(config)) == {"a": {"c": None}, "b": [1, 2]}
  same = {"b": (1, 2), "a": {"c": None}}  # In another order.
  assert settings.digest(config) == settings.digest(same)
  assert settings.digest(config) != settings.digest(same | {"b": (1, 3)})
  assert "float" in settings.to_json({"dtype": float})
