"""The argument after `--config=x.py:`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from configs import common

SPEC = dict(
  variant="B/16", runlocal=False, res=224, lr=1e-3, init=None, aug=True
)


@pytest.mark.parametrize("arg", [None, ""])
def test_no_argument_gives_the_defaults(arg):
  assert common.parse_arg(arg, **SPEC).to_dict() == SPEC


@pytest.mark.parametrize(
  "arg, changes",
  [
    ("runlocal", {"runlocal": True}),
    ("runlocal=True", {"runlocal": True}),
    ("aug=False,runlocal=true", {"aug": False, "runlocal": True}),
    ("aug=0", {"aug": False}),
    ("variant=S/16,res=384", {"variant": "S/16", "res": 384}),
    ("S/16,runlocal", {"variant": "S/16", "runlocal": True}),
    ("runlocal,variant=S/16", {"variant": "S/16", "runlocal": True}),
    ("variant=", {"variant": ""}),
    ("variant=16", {"variant": "16"}),
    ("variant=a=b", {"variant": "a=b"}),
    ("res=1e3", {"res": 1000}),
    ("lr=3", {"lr": 3.0}),
    ("lr=3e-4", {"lr": 3e-4}),
    ("init=12", {"init": 12}),
    ("init=path/to.npz", {"init": "path/to.npz"}),
    ("init=None", {"init": None}),
  ],
)
def test_values_have_the_type_of_their_default(arg, changes):
  got = common.parse_arg(arg, **SPEC).to_dict()
  assert got == SPEC | changes
  for name in changes:
    if SPEC[name] is not None:
      assert type(got[name]) is type(SPEC[name])


def test_values_are_attributes():
  assert common.parse_arg("S/16", **SPEC).variant == "S/16"
  assert common.parse_arg("128", res=224, runlocal=False).res == 128


@pytest.mark.parametrize(
  "arg, message",
  [
    ("runlocl", "unknown name 'runlocl'.*Did you mean 'runlocal'"),
    ("varient=S/16", "Did you mean 'variant'"),
    ("S/16,xyzzy=1", "unknown name 'xyzzy'.*variant.*runlocal"),
    ("res=224,S/16", "unknown name 'S/16'"),  # Only the first may omit it.
    ("S/16,variant=B/16", "'variant' is given twice"),
    ("res", "'res' needs a value"),
    ("res=large", "res=large: expected int, as in 224"),
    ("res=0.5", "expected int"),
    ("res=True", "expected int"),
    ("lr=fast", "expected float"),
    ("lr=", "expected float"),
    ("runlocal=maybe", "runlocal=maybe: expected bool, as in False"),
    ("runlocal=2", "expected bool"),
    ("runlocal,,res=1", "unknown name ''"),
  ],
)
def test_mistakes(arg, message):
  with pytest.raises(ValueError, match=message):
    common.parse_arg(arg, **SPEC)


def test_a_bool_needs_its_name():
  with pytest.raises(ValueError, match="unknown name 'True'"):
    common.parse_arg("True", runlocal=False)


@given(
  st.fixed_dictionaries(
    {
      "variant": st.text(
        st.characters(exclude_characters=",", exclude_categories=("Cs",))
      ),
      "runlocal": st.booleans(),
      "res": st.integers(-(2**50), 2**50),
      "lr": st.floats(allow_nan=False, allow_infinity=False),
    }
  )
)
def test_values_round_trip(values):
  arg = ",".join(f"{name}={value}" for name, value in values.items())
  assert common.parse_arg(arg, **SPEC).to_dict() == SPEC | values


CONFIG = """
from configs import common

def get_config(arg=None):
  arg = common.parse_arg(arg, variant="B/16", runlocal=False)
  return dict(variant=arg.variant, steps=2 if arg.runlocal else 100)
"""


def test_through_the_command_line(tmp_path):
  path = tmp_path / "x.py"
  path.write_text(CONFIG)
  assert loading.load(str(path)) == {"variant": "B/16", "steps": 100}
  assert loading.load(f"{path}:S/16,runlocal") == {
    "variant": "S/16",
    "steps": 2,
  }
  with pytest.raises(
    ConfigError, match=r"x\.py:5: ValueError: .*Did you mean 'runloc"
  ) as e:
    loading.load(f"{path}:runlokal")
  assert "\n" not in str(e.value)
