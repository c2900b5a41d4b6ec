import ast
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support import processes

from bigtrain.config.errors import ConfigError
from bigtrain.pp import parse, registry

NO_DRAWS = np.zeros(0, np.float32)


@pytest.fixture
def recorded(monkeypatch):
  """Registers an op "record" with any arguments; lists the arguments."""
  calls = []

  def record(*args, **kwargs):
    calls.append((args, kwargs))
    return registry.Op(lambda features, u: features)

  # Its signature names no arguments, so the check is switched off.
  monkeypatch.setitem(registry._factories, "record", record)
  monkeypatch.setattr(
    parse, "check_arguments", lambda factory, args, kwargs: kwargs
  )
  return calls


def test_ops_come_in_the_order_of_the_spec():
  ops = parse.parse("value_range(0, 1, in_max=16)|keep('image')|drop('image')")
  assert [op.name for op in ops] == [
    "value_range(0, 1, in_max=16)",
    "keep('image')",
    "drop('image')",
  ]
  image = np.array([0, 8, 16], np.uint8)
  out = registry.compose(ops[:2]).fn({"image": image, "x": image}, NO_DRAWS)
  assert list(out) == ["image"]
  np.testing.assert_array_equal(out["image"], [0, 0.5, 1])


def test_a_bare_name_is_a_call_without_arguments():
  assert parse.parse("flip_lr")[0].draws == parse.parse("flip_lr()")[0].draws


def test_a_spec_may_span_lines_and_have_comments():
  spec = """
    decode  # from JPEG
    |inception_crop(224)|flip_lr
    | value_range(-1,
                  1)
  """
  names = [op.name for op in parse.parse(spec)]
  assert names[1:] == ["flip_lr", "value_range(-1, 1)"]


def test_a_bar_inside_a_string_is_not_a_separator(recorded):
  parse.parse("record('a|b')|record(\"c|d(e)|f\")")
  assert recorded == [(("a|b",), {}), (("c|d(e)|f",), {})]


literals = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=6,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
  lambda name: _is_name(name)
)


def _is_name(name):
  try:
    return isinstance(ast.parse(name, mode="eval").body, ast.Name)
  except SyntaxError:
    return False


@hypothesis.settings(
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
  st.lists(
    st.tuples(
      st.lists(literals, max_size=3),
      st.dictionaries(names, literals, max_size=3),
    ),
    min_size=1,
    max_size=4,
  )
)
def test_literal_arguments_arrive_as_written(recorded, calls):
  recorded.clear()
  ops = []
  for args, kw in calls:
    written = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kw.items()]
    ops.append(f"record({', '.join(written)})")
  parse.parse("|".join(ops))
  assert recorded == [(tuple(args), kw) for args, kw in calls]


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.text(max_size=40) | st.text("()|'a_,=*.-1[]{}", max_size=20)
)
def test_any_text_gives_ops_or_a_config_error(text):
  try:
    assert parse.parse(text)
  except ConfigError as e:
    assert str(e)


@pytest.mark.parametrize(
  "code",
  [
    "open(%r, 'w')",
    "__import__('os').system('touch ' + %r)",
    "keep(__import__('os').system('touch ' + %r))",
    "keep(open(%r, 'w').name)",
    "keep(*[open(%r, 'w').name])",
    "keep(**{'a': open(%r, 'w')})",
    "keep([open(p, 'w') for p in [%r]])",
    "keep((lambda: open(%r, 'w'))())",
    "keep(f'{open(%r, chr(119))}')",
    "keep('x')|open(%r, 'w')",
    "(lambda: open(%r, 'w'))()",
    "keep if open(%r, 'w') else drop",
    "keep('x').fn.__globals__['open'](%r, 'w')",
    "keep('x'))|(open(%r, 'w')",
    "keep(x := open(%r, 'w'))",
    "lookup({open(%r, 'w'): 1})",
  ],
)
def test_code_in_a_spec_is_refused_and_not_run(code, tmp_path):
  target = tmp_path / "evaluated"
  with pytest.raises(ConfigError):
    parse.parse(code % str(target))
  assert not target.exists()
  # Check of the test: evaluating the same expression creates the file.
  if code.startswith("open"):
    eval(code % str(target))
    assert target.exists()


@pytest.mark.parametrize(
  "spec, expected",
  [
    ("", "spec is empty"),
    (" \n ", "spec is empty"),
    (3, "expected a string, got 3"),
    ("flip_rl", "op 1 of 1, 'flip_rl': unknown op 'flip_rl'. Did you mean "),
    ("keep('a')|flop_lr", "op 2 of 2, 'flop_lr': unknown op"),
    ("value_range(-1, vmx=1)", "unknown argument 'vmx'. Did you mean 'vmax'?"),
    ("value_range(-1, vmin=1)", "multiple values for argument 'vmin'"),
    ("resize", "missing a required argument: 'size'"),
    ("resize()", "missing a required argument: 'size'"),
    ("flip_lr('image', None, 1)", "too many positional arguments"),
    ("resize('224')", "argument 'size' is '224', expected int | tuple"),
    ("resize((224,))", "argument 'size' is (224,)"),
    ("resize(2.5)", "argument 'size' is 2.5"),
    ("resize(True)", "argument 'size' is True"),
    ("resize(0)", "expected at least 1"),
    ("resize(8, 'bilinaer')", "expected Literal['bilinear'"),
    ("keep(1)", "argument 'keys' is 1, expected str"),
    ("keep", "expected the names of features"),
    ("inception_crop(8, area_min=0)", "0 < area_min <= area_max"),
    ("inception_crop(8, ratio_min=2)", "ratio_min <= ratio_max"),
    ("value_range(1, -1)", "expected vmin < vmax"),
    ("vgg_value_range((1, 2), (3,))", "expected a positive std for each mean"),
    (
      "random_crop(8, -1)",
      "argument 'pad': expected a whole number at least 0",
    ),
    ("random_crop(8, 1, 'mirror')", "expected Literal['constant'"),
    ("reshape((-1, -1))", "one may be -1"),
    ("cast('flaot32')", "Did you mean 'float32'?"),
    (
      "onehot(0)",
      "argument 'depth': expected a whole number at least 1, got 0",
    ),
    ("randaug(0)", "'num_layers': expected a whole number at least 1, got 0"),
    ("randaug(2, 31)", "expected a number at least 0 and at most 30, got 31"),
    ("lookup('nowhere.txt')", "/nowhere.txt'."),
    ("lookup([])", "mapping' is empty"),
    ("lookup(['a', 1])", "all strings or all integers"),
    ("lookup(['a', 'a'])", "has 'a' 2 times"),
    ("lookup({'a': 'b'})", "id of 'a' is 'b'"),
    ("lookup(['a'], ',')", "'sep' needs a file"),
    ("flip_lr|", "at its end: invalid syntax"),
    ("flip_lr||flip_lr", "at character 9"),
    ("flip_lr\n|resize(", "never closed"),
    ("keep('a')|)(", "at character 11: "),
    ("keep)('a'", "expected name or name(literals)"),
    ("flip_lr)|(flip_lr", "expected name or name(literals)"),
    ("flip_lr, flip_lr", "expected name or name(literals)"),
    ("flip_lr + flip_lr", "expected a name or name(literals)"),
    ("flip_lr & flip_lr | keep('a')", "op 1 of 2: expected a name"),
    ("'flip_lr'", "expected a name or name(literals)"),
    ("pp.flip_lr", "expected a name or name(literals)"),
    ("keep(image)", "expected literals"),
    ("keep(**{})", "'**'"),
    ("keep({[]: 1})", "expected literals"),
    ("# nothing", "expected name"),
    ("keep('\0')", "null"),
    ("resize(" + "-" * 3000 + "1)", ""),
    ("resize(" + "[" * 150 + "]" * 150 + ")", "argument 'size'"),
  ],
)
def test_an_error_is_one_line_with_the_position(spec, expected):
  with pytest.raises(ConfigError) as e:
    parse.parse(spec)
  assert expected in str(e.value)
  assert "\n" not in str(e.value)


def test_user_modules_register_their_own_ops(tmp_path, monkeypatch):
  (tmp_path / "my_ops.py").write_text(
    "from bigtrain.pp import registry\n"
    "@registry.register('double_it')\n"
    "def double_it(key: str = 'image'):\n"
    "  return registry.on_feature(lambda x, u: 2 * x, key)\n"
  )
  (tmp_path / "broken_ops.py").write_text("import no_such_thing_at_all\n")
  monkeypatch.syspath_prepend(tmp_path)
  (op,) = parse.parse("double_it", modules=["my_ops"])
  assert op.fn({"image": 3}, NO_DRAWS) == {"image": 6}
  with pytest.raises(ConfigError, match="no module named 'my_opz'"):
    parse.parse("double_it", modules=["my_opz"])
  with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
    parse.parse("double_it", modules=["broken_ops"])
  with pytest.raises(ConfigError, match="double_it.*has already registered"):
    registry.register("double_it")(lambda: None)
  del registry._factories["double_it"]


def names_of(spec):
  return [op.name for op in parse.parse(spec)]


def test_decode_is_fused_with_the_crop_that_follows():
  for crop in ("inception_crop(8)", "random_crop(8)", "central_crop(8)"):
    assert names_of(f"decode|{crop}|flip_lr") == [f"decode|{crop}", "flip_lr"]
    fused, apart = parse.parse(f"decode|{crop}")[0], parse.parse(crop)[0]
    assert fused.draws == apart.draws
    assert fused.tensorflow and not fused.batched
  assert len(names_of("decode(key='a')|central_crop(8, key='a')")) == 1
  assert len(names_of("decode(key_result='a')|central_crop(8, key='a')")) == 1


@pytest.mark.parametrize(
  "spec",
  [
    "decode|random_crop(8, pad=1)",
    "decode|flip_lr|central_crop(8)",
    "decode|central_crop(8, key='other')",
    "decode|central_crop(8, key_result='crop')",
    "decode|resize(8)",
  ],
)
def test_decode_is_not_fused_if_that_would_change_the_result(spec):
  assert len(names_of(spec)) == spec.count("|") + 1


def test_fused_ops_are_not_fused_again():
  assert names_of("decode|central_crop(8)|central_crop(4)") == [
    "decode|central_crop(8)",
    "central_crop(4)",
  ]


def test_basic_ops_run_without_tensorflow():
  code = (
    "import sys, numpy as np\n"
    "from bigtrain.pp import parse, registry\n"
    "op = registry.compose(parse.parse('reshape((8, 8, 1))|flip_lr|'\n"
    "  'random_crop(8, pad=1)|central_crop(4)|value_range(-1, 1, 0, 16)|'\n"
    '  \'onehot(10)|copy("image", "again")|keep("image", "labels")\'))\n'
    "assert not op.tensorflow\n"
    "out = op.fn({'image': np.ones(64), 'labels': np.int64(3)},\n"
    "            np.full(op.draws, 0.5, np.float32))\n"
    "assert out['image'].shape == (4, 4, 1)\n"
    "parse.parse('decode|inception_crop(8)|randaug|lookup([\"a\"])')\n"
    "assert 'tensorflow' not in sys.modules\n"
  )
  result = processes.run([sys.executable, "-c", code])
  assert result.returncode == 0, result.stderr
