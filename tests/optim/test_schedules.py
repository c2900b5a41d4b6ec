"""Schedules: formulas, units, invalid configs, and laws for all."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.optim import schedules

UNITS = Units(
  batch_size=10,
  examples_per_epoch=200,  # 20 steps
  tokens_per_example=4,
  total_steps=100,
)


def make(units=UNITS, **spec):
  return schedules.make(spec, units)


@pytest.mark.parametrize(
  "spec, step, expected",
  [
    (dict(decay_type="constant"), 57, 1.0),
    (dict(decay_type="constant", warmup_steps=10), 3, 0.3),
    (dict(decay_type="constant", cooldown_steps=20), 95, 0.25),
    (dict(decay_type="cosine"), 25, (1 + math.cos(math.pi / 4)) / 2),
    (dict(decay_type="cosine", end=0.1), 50, 0.55),
    (dict(decay_type="cosine", end=0.1), 100, 0.1),
    (dict(decay_type="cosine", warmup_steps=20), 60, 0.5),
    (dict(decay_type="linear", linear_end=0.2), 25, 0.8),
    (dict(decay_type="linear", warmup_steps=50), 75, 0.5),
    (dict(decay_type="polynomial", power=2), 50, 0.25),
    (dict(decay_type="polynomial", power=2, end=0.5), 50, 0.625),
    (dict(decay_type="rsqrt", timescale_steps=10), 30, 0.5),
    (dict(decay_type="rsqrt", timescale_steps=10, warmup_steps=5), 35, 0.5),
    (dict(decay_type="rsqrt", timescale_steps=10, shift_steps=30), 0, 0.5),
    # The shift applies in the warm-up too.
    (
      dict(
        decay_type="rsqrt", timescale_steps=1, shift_steps=3, warmup_steps=2
      ),
      1,
      0.25,
    ),
    (dict(decay_type="stair", stair_steps=[5, 9], mults=[0.5, 0.1]), 4, 1.0),
    (dict(decay_type="stair", stair_steps=[5, 9], mults=[0.5, 0.1]), 5, 0.5),
    (dict(decay_type="stair", stair_steps=[5, 9], mults=[0.5, 0.1]), 9, 0.1),
    # Steps beyond the end of the run.
    (dict(decay_type="cosine"), 120, 0.0),
    (dict(decay_type="constant", cooldown_steps=20), 120, 0.0),
  ],
)
def test_formulas(spec, step, expected):
  fn = make(**spec)
  assert fn(step) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
  "length",
  [
    dict(warmup_steps=40),
    dict(warmup_epochs=2),
    dict(warmup_examples=400),
    dict(warmup_tokens=1600),
    dict(warmup_percent=40),
  ],
)
def test_units_of_the_warmup(length):
  fn = make(decay_type="cosine", **length)
  assert fn(20) == pytest.approx(0.5)
  assert fn(40) == pytest.approx(1.0)
  assert fn(41) < 1.0


def test_units_of_other_lengths():
  rsqrt = make(decay_type="rsqrt", timescale_epochs=0.5)
  assert rsqrt(30) == pytest.approx(0.5)
  stair = make(decay_type="stair", stair_epochs=[1, 2], mults=[0.5, 0.1])
  assert [float(stair(s)) for s in (19, 20, 39, 40)] == pytest.approx(
    [1, 0.5, 0.5, 0.1]
  )
  cooldown = make(decay_type="constant", cooldown_percent=50)
  assert cooldown(75) == pytest.approx(0.5)


def test_steps_beyond_the_precision_of_float32():
  total = 2**25
  units = Units(batch_size=1, total_steps=total)
  fn = make(units, decay_type="constant", cooldown_steps=10)
  values = [fn(step) for step in range(total - 11, total + 1)]
  np.testing.assert_allclose(values, [1.0, *np.linspace(1, 0, 11)], atol=1e-6)


@st.composite
def specs(draw):
  total = draw(st.integers(2, 3000))
  warmup = draw(st.integers(0, total - 1))
  cooldown = draw(st.integers(0, total - warmup))
  fraction = st.floats(0, 1)
  kind, kwargs = draw(
    st.one_of(
      st.tuples(st.just("constant"), st.just({})),
      st.tuples(
        st.just("cosine"), st.fixed_dictionaries({}, optional={"end": fraction})
      ),
      st.tuples(
        st.just("linear"),
        st.fixed_dictionaries({}, optional={"linear_end": fraction}),
      ),
      st.tuples(
        st.just("polynomial"),
        st.fixed_dictionaries(
          {"power": st.floats(0.1, 5)}, optional={"end": fraction}
        ),
      ),
      st.tuples(
        st.just("rsqrt"),
        st.fixed_dictionaries(
          {"timescale_steps": st.integers(1, 1000)},
          optional={"shift_steps": st.integers(0, 100)},
        ),
      ),
    )
  )
  spec = dict(
    decay_type=kind, warmup_steps=warmup, cooldown_steps=cooldown, **kwargs
  )
  return total, spec


@hypothesis.given(specs())
@hypothesis.settings(max_examples=150, deadline=None)
def test_shape_of_all_schedules(case):
  total, spec = case
  warmup, cooldown = spec["warmup_steps"], spec["cooldown_steps"]
  fn = make(Units(batch_size=1, total_steps=total), **spec)
  values = np.array([fn(step) for step in range(total + 1)])
  assert np.all((values >= 0) & (values <= 1 + 1e-6))
  # It rises during the warm-up, at most linearly, then falls.
  assert np.all(np.diff(values[: warmup + 1]) >= -1e-6)
  assert np.all(np.diff(values[: warmup + 1]) <= 1 / max(1, warmup) + 1e-6)
  assert np.all(np.diff(values[warmup:]) <= 1e-6)
  if warmup:
    assert values[0] == 0
  if cooldown or (spec["decay_type"] == "cosine" and "end" not in spec):
    assert values[-1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
  "spec, message",
  [
    (dict(), "decay_type: missing. There are: constant, cosine"),
    (dict(decay_type="cosin"), "unknown 'cosin'. Did you mean 'cosine'?"),
    (
      dict(decay_type="cosine", warmup_step=5),
      "schedule.warmup_step: unknown key of 'cosine'. Did you mean "
      "'warmup_steps'?",
    ),
    (dict(decay_type="cosine", linear_end=0.1), "linear_end: unknown key"),
    (dict(decay_type="cosine", timescale_steps=9), "timescale_steps: unknown"),
    (dict(decay_type="rsqrt", timescale=9), "Did you mean 'timescale_"),
    (dict(decay_type="rsqrt", timescale_steps=0), "timescale: expected a"),
    (
      dict(decay_type="cosine", warmup_steps=5, warmup_epochs=1),
      "warmup_steps and config.schedule.warmup_epochs",
    ),
    (dict(decay_type="cosine", warmup_steps=100), "do not fit into a run of"),
    (
      dict(decay_type="cosine", warmup_steps=60, cooldown_steps=60),
      "warm-up of 60 and cool-down of 60 steps do not fit into a run of 100",
    ),
    (dict(decay_type="cosine", end="low"), "end: expected a number, got 'low'"),
    (dict(decay_type="polynomial", power=0), "power: expected a number above"),
    (dict(decay_type="stair", stair_steps=[5]), "stair needs"),
    (
      dict(decay_type="stair", stair_steps=[5, 5], mults=[0.5, 0.1]),
      "expected 2 growing steps, one for each of config.schedule.mults, got "
      "[5, 5]",
    ),
    (
      dict(decay_type="stair", stair_steps=[5], mults=[0.5, 0.1]),
      "expected 2 growing steps, one for each of config.schedule.mults, got "
      "[5]",
    ),
    (dict(decay_type="stair", stair_steps=5, mults=[1]), "expected lists"),
  ],
)
def test_invalid_schedules_are_errors(spec, message):
  with pytest.raises(ConfigError) as e:
    make(**spec)
  assert message in str(e.value)


def test_runs_of_unknown_length():
  units = Units(batch_size=1)
  assert make(units, decay_type="rsqrt", timescale_steps=1)(3) == 0.5
  with pytest.raises(ConfigError, match="cosine needs the length of the run"):
    make(units, decay_type="cosine")
  with pytest.raises(ConfigError, match="cooldown needs the length of the run"):
    make(units, decay_type="constant", cooldown_steps=3)


def test_runs_of_one_step_keep_longer_warmups():
  units = Units(batch_size=1, total_steps=1)
  assert make(units, decay_type="cosine", warmup_steps=10)(0) == 0


@pytest.mark.parametrize(
  "spec, step, expected",
  [
    (dict(decay_steps=40), 59, 1.0),
    (dict(decay_steps=40), 80, 0.5),
    (dict(decay_percent=40, end=0.1), 100, 0.1),
    (dict(decay_steps=40, shape="sqrt"), 70, 0.5),
    (dict(decay_steps=40, shape="cosine"), 70, (1 + math.sqrt(0.5)) / 2),
    (dict(decay_steps=40, warmup_steps=10), 5, 0.5),
  ],
)
def test_warmup_stable_decay(spec, step, expected):
  fn = make(decay_type="wsd", **spec)
  assert fn(step) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("total", [10, 100, 101])
@pytest.mark.parametrize(
  "spec, pct_start, div, final_div",
  [
    ({}, 0.3, 25.0, 1e4),
    (
      dict(peak_steps=4, div_factor=5.0, final_div_factor=20.0),
      None,
      5.0,
      20.0,
    ),
  ],
)
def test_one_cycle_is_that_of_pytorch(total, spec, pct_start, div, final_div):
  """By the definition of torch.optim.lr_scheduler.OneCycleLR."""
  fn = make(
    Units(batch_size=1, total_steps=total), decay_type="one_cycle", **spec
  )
  top = 4 if pct_start is None else pct_start * total - 1
  phases = [(top, 1 / div, 1.0), (total - 1, 1.0, 1 / (div * final_div))]

  def expected(step):
    begin = 0
    for end_step, start, end in phases:
      if step <= end_step or end_step == total - 1:
        done = (step - begin) / (end_step - begin)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * done))
      begin = end_step

  for step in range(total):
    assert fn(step) == pytest.approx(expected(step), abs=1e-9)


def test_pieces_follow_one_another():
  fn = make(
    decay_type="pieces",
    pieces=[
      dict(decay_type="linear", linear_end=0.5, length_percent=40),
      dict(decay_type="constant", scale=0.5, length_epochs=1),
      dict(decay_type="cosine", scale=0.5, warmup_percent=50),
    ],
  )
  expected = {0: 1.0, 20: 0.75, 39: 0.5125, 40: 0.5, 59: 0.5}
  # The last 40 steps: 20 of warm-up, then half a cosine.
  expected |= {60: 0.0, 70: 0.25, 80: 0.5, 90: 0.25, 100: 0.0}
  for step, value in expected.items():
    assert fn(step) == pytest.approx(value, abs=1e-6)


def test_schedules_of_users_by_dotted_path():
  path = "optim.own_parts."
  fn = make(decay_type=path + "waves", number=2, warmup_steps=20)
  # A quarter of a wave is an eighth of the 80 steps after the warm-up.
  for step, value in {10: 0.5, 20: 1.0, 30: 1.5, 50: 0.5, 60: 1.0}.items():
    assert float(fn(step)) == pytest.approx(value, abs=1e-5)
  assert make(decay_type=path + "steep")(50) == pytest.approx(1 / 16)
  for spec, message in (
    (dict(decay_type=path + "wave"), "has no 'wave'. Did you mean 'waves'"),
    (dict(decay_type=path + "waves"), "schedule.number: missing"),
    (dict(decay_type=path + "steep", power=2), "power: unknown key"),
    (dict(decay_type=path + "NUMBER"), "expected a function"),
  ):
    with pytest.raises(ConfigError, match=message):
      make(**spec)


@pytest.mark.parametrize(
  "spec, message",
  [
    (dict(decay_type="wsd"), "wsd needs the length of its decay"),
    (dict(decay_type="wsd", decay_steps=101), "within the run of 100 steps"),
    (
      dict(decay_type="wsd", decay_steps=9, shape="squrt"),
      "schedule.shape: unknown 'squrt'. Did you mean 'sqrt'?",
    ),
    (dict(decay_type="pieces"), "pieces: expected a list of dicts, got None"),
    (
      dict(decay_type="pieces", pieces=[dict(decay_type="constant")] * 2),
      "pieces[0]: expected a length, such as length_percent=10",
    ),
    (
      dict(
        decay_type="pieces",
        pieces=[
          dict(decay_type="constant", length_steps=10),
          dict(decay_type="cosin"),
        ],
      ),
      "pieces[1].decay_type: unknown 'cosin'. Did you mean 'cosine'?",
    ),
    (
      dict(
        decay_type="pieces",
        pieces=[dict(decay_type="constant", length_steps=10)],
      ),
      "as the last piece takes the remaining 100 steps, got 10",
    ),
  ],
)
def test_mistakes_in_composed_schedules_are_explained(spec, message):
  with pytest.raises(ConfigError) as e:
    make(**spec)
  assert message in str(e.value)
