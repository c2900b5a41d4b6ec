"""Variants from a grid and from get_sweep."""

import pytest
from support import processes

from bigtrain.config.errors import ConfigError
from bigtrain.tools.sweep import variants

CONFIG = """
def get_config(arg=None):
  model = dict(depth=2, width=8, name="vit", dropout=0.0)
  return dict(lr=1e-3, wd=None, betas=(0.9, 0.99), text=dict(depth=1),
              pp="decode|resize(8)", model=model, total_steps=int(arg or 10))


def get_sweep():
  return SWEEP
"""


@pytest.fixture
def make(tmp_path):
  def call(*grid, sweep="None", changes=(), argument=""):
    path = tmp_path / "x.py"
    path.write_text(CONFIG.replace("SWEEP", sweep))
    return variants.make(f"{path}{argument}", list(changes), list(grid))

  return call


def names(made):
  return [variant.name for variant in made]


def test_grids_are_combined(make):
  made = make("lr=1e-3,3e-4", "model.depth=6,12")
  assert names(made) == [
    "lr=0.001,depth=6",
    "lr=0.001,depth=12",
    "lr=0.0003,depth=6",
    "lr=0.0003,depth=12",
  ]
  assert made[3].flags == ["--config.lr=3e-4", "--config.model.depth=12"]
  assert made[3].changes == {"lr": 3e-4, "model.depth": 12}
  assert len({variant.digest for variant in made}) == 4
  # Another way to write the same value is the same variant.
  assert make("lr=0.001,0.0003", "model.depth=6,12") == [
    v._replace(flags=[v.flags[0].replace(a, b), v.flags[1]])
    for v, (a, b) in zip(
      made, 2 * [("1e-3", "0.001")] + 2 * [("3e-4", "0.0003")]
    )
  ]


def test_values_keep_their_types(make):
  made = make("betas=(0.9,0.95),(0.8,0.9)", "wd=None,1e-4")
  assert names(made)[:2] == [
    "betas=0.9-0.95,wd=None",
    "betas=0.9-0.95,wd=0.0001",
  ]
  assert made[3].changes == {"betas": (0.8, 0.9), "wd": 1e-4}
  (made,) = make("pp=decode|resize(8)|crop(4,4)")
  assert made.name == "pp=decode-resize-8-crop-4-4"
  assert made.changes == {"pp": "decode|resize(8)|crop(4,4)"}


def test_changes_and_arguments_hold_for_all_variants(make):
  first = make("lr=1,2")
  assert first[0].digest != make("lr=1,2", changes=["model.width=4"])[0].digest
  assert first[0].digest != make("lr=1,2", argument=":20")[0].digest


def test_names_are_distinct(make):
  made = make("model.depth=1,2", "text.depth=3")
  assert names(made)[0] == "model.depth=1,text.depth=3"
  made = make("pp=a|b,a+b,a/b")
  assert len(set(names(made))) == 3
  (made,) = make("pp=" + "x" * 300)
  assert len(made.name) <= 80


@pytest.mark.parametrize(
  "sweep, expected",
  [
    ('{"lr": [1e-3, 1e-4]}', ["lr=0.001", "lr=0.0001"]),
    (
      '[{"lr": 0.1, "wd": 0.2}, {"model.name": "12"}]',
      ["lr=0.1,wd=0.2", "name=12"],
    ),
  ],
)
def test_get_sweep(make, sweep, expected):
  made = make(sweep=sweep)
  assert names(made) == expected
  # The flags mean the same on the command line.
  assert all(
    make(*[f.removeprefix("--config.") for f in v.flags])[0].digest == v.digest
    for v in made
  )


def test_the_sweep_of_the_quickstart():
  config = processes.ROOT / "configs" / "digits.py"
  for argument in ("", ":runlocal"):
    assert len(variants.make(f"{config}{argument}", [], [])) == 4


@pytest.mark.parametrize(
  "grid, message",
  [
    ("model.dept=1", "model.dept: config.model has no 'dept'. Did you mean 'd"),
    ("modle.depth=1", "config has no 'modle'. Did you mean 'model'"),
    ("lr.x=1", "config.lr has no 'x'"),
    ("seed=1", "add it with --config.seed=VALUE"),
    ("model.depth=1,deep", "--grid model.depth=deep: expected int, as in 2"),
    ("lr", "expected KEY=VALUE,VALUE"),
    ("lr=1,,2", "expected KEY=VALUE,VALUE"),
    ("lr=0.1,1e-1", "two variants are the same: lr=1e-1"),
  ],
)
def test_mistakes_of_a_grid(make, grid, message):
  with pytest.raises(ConfigError) as error:
    make(grid)
  assert message in str(error.value)


@pytest.mark.parametrize(
  "sweep, message",
  [
    ("None", "expected {KEY: [VALUE"),
    ('{"lr": 1}', "lr: expected a list of values"),
    ('[{"lrr": 1}]', "get_sweep lrr: config has no 'lrr'. Did you mean 'lr'"),
    ("1 / 0", "ZeroDivisionError"),
  ],
)
def test_mistakes_of_get_sweep(make, sweep, message):
  with pytest.raises(ConfigError) as error:
    make(sweep=sweep)
  assert message in str(error.value)


def test_a_key_in_two_grids_is_an_error(make):
  with pytest.raises(ConfigError, match="lr is in two grids"):
    make("lr=1", "lr=2")
