"""docs/coming_from.md: every config line is applied to a small run.

A row's lines are run in a config of its table, in a folder that has the files
that they name. Input, model, optimizer, evaluators and hooks are built, the
update and the evaluators' programs are traced, initial parameters are loaded,
and every key has been read. Schedules and optimizers are compared with the
formulas of the other trainer.
"""

import copy
import itertools
import json
import math
import pathlib
import pickle
import re
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from support import compile_cache, old_runs

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config import lengths, loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder as decoder_lib
from bigtrain.models import vit as vit_lib
from bigtrain.objective import building
from bigtrain.optim import chain, schedules

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/coming_from.md").read_text()
TABLES = {
  *("T5X", "T5X: mixture of experts", "big_vision", "big_vision's configs"),
  *("LiBai", "Modalities"),
}


class Row(NamedTuple):
  """A row of a table, or a part of it whose lines set different keys."""

  table: str
  there: str
  here: str
  lines: tuple[str, ...]

  def __str__(self):
    """Name of the test."""
    name = re.sub(r"[^\w.=]+", "-", f"{self.table} {self.there}")
    return name[:60].strip("-")


def read_rows():
  """All rows of the page; the alternatives of a row are rows of their own."""
  for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
    table, _, text = section.partition("\n")
    for line in text.partition("|---|")[2].splitlines()[1:]:
      if not line.startswith("|"):
        continue
      cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
      there, here, code = [cell.strip().replace(r"\|", "|") for cell in cells]
      assert code == "-" or code.startswith("`"), line
      spans = re.findall(r"`([^`]+)`", code)
      keys, part = set(), []
      for span in [*spans, None]:
        key = span and re.split(r"\s*=\s*", span.removeprefix("del "))[0]
        if (span is None and (part or not spans)) or key in keys:
          yield Row(table, there, here, tuple(part))
          keys, part = set(), []
        keys.add(key)
        part.append(span)


ROWS = list(read_rows())


def test_the_page_has_its_tables():
  counts = {
    table: len(list(rows))
    for table, rows in itertools.groupby(ROWS, lambda row: row.table)
  }
  assert counts.keys() == TABLES
  assert counts["T5X: mixture of experts"] > 15
  assert all(count > 15 for count in counts.values()), counts
  for row in ROWS:
    assert row.there and row.here, row
    for line in row.lines:
      assert line.startswith(("config.", "del config.")), line
      compile(line, str(row), "exec")
    if not row.lines and row.here.startswith("None"):
      assert re.match(r"None( as such)?: .{15}", row.here), (
        row
      )  # With a reason.


NAMED = sorted(set(re.findall(r"`(configs/\w+\.py(?::[^`]+)?)`", PAGE)))


@pytest.mark.parametrize("spec", NAMED)
def test_the_named_configs_build(spec):
  config = settings.Config(loading.load(str(ROOT / spec)))
  assert building.task(config) and building.model(config)


def test_the_named_commands_exist():
  for module, words in re.findall(r"`python -m ([\w.]+)([^`]*)`", PAGE):
    path = ROOT / module.replace(".", "/")
    if not module.startswith("bigtrain"):
      continue  # A program of the other trainer.
    files = [path.with_suffix(".py"), *path.glob("*.py")]
    text = "".join(f.read_text() for f in files if f.exists())
    assert text, module
    if module == "bigtrain.main":
      text += (ROOT / "bigtrain/command.py").read_text()
    for flag in re.findall(r"--(\w+)", words):
      assert f'"{flag}"' in text or f'"--{flag}"' in text, (module, flag)


# The files that the lines name.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with the files that the page's lines name."""
  folder = tmp_path_factory.mktemp("coming")
  rng = np.random.default_rng(0)
  ids = rng.integers(3, 12, 2000).astype(np.uint16)
  ids[::20] = 2  # Ends of documents.
  corpus = folder / "corpus"
  corpus.mkdir()
  for name in ("train.bin", "other.bin", "megatron.bin"):
    (corpus / name).write_bytes(ids.tobytes())
  sizes = np.full(100, 20, np.int32)
  starts = (np.cumsum(sizes) - sizes).astype(np.int64) * 2
  header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 100, 100)
  numbers = np.arange(100, dtype=np.int64)
  (corpus / "megatron.idx").write_bytes(
    header + sizes.tobytes() + starts.tobytes() + numbers.tobytes()
  )
  index = list(zip(starts.tolist(), (sizes * 2).tolist()))
  packed = len(ids.tobytes()).to_bytes(8, "little") + (2).to_bytes(4, "little")
  (corpus / "train.pbin").write_bytes(
    packed + ids.tobytes() + pickle.dumps(index)
  )
  np.savez(
    folder / "questions.npz",
    inputs=rng.integers(3, 12, (8, 6)).astype(np.int32),
    targets=rng.integers(3, 12, (8, 4)).astype(np.int32),
  )
  np.savez(
    folder / "captions.npz",
    image=rng.normal(size=(64, 8, 8, 3)).astype(np.float32),
    labels=rng.integers(1, 16, (64, 6)).astype(np.int32),
  )
  pairs = [{"prompt": "ab" * n, "completion": "c" * n} for n in range(1, 17)]
  for name, rows in (
    ("pairs", pairs),
    ("texts", [{"text": "a text " * (1 + n % 4)} for n in range(64)]),
  ):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text)
  old_runs.unpack(folder)
  return folder


TOKENS = dict(type="tokens", path="corpus/train.bin", length=12, vocab_size=24)
SPANS = (
  "span_corruption(12,density=0.25,mean_span=2.0,sentinel=23,num_sentinels=6,"
  "eos_id=2)|keep('inputs','targets')"
)
DIGITS = (
  "value_range(-1,1,0,16)|onehot(10,key='label',key_result='labels')"
  "|keep('image','labels')"
)
CAPTIONS = dict(type="arrays", path="captions.npz")
SIZES = dict(width=16, depth=1, mlp_dim=16, num_heads=2)


def base(**keys):
  """What the small runs have in common."""
  return (
    dict(
      total_steps=600_000,
      log_steps=1,
      ckpt_steps=1000,
      tensorboard=False,
      compile_cache=str(compile_cache.FOLDER),
      optimizer=dict(name="sgd"),
      lr=0.01,
    )
    | keys
  )


def t5(**model):
  evaluation = dict(type="perplexity", pred="perplexity", data=TOKENS, pp=SPANS)
  return base(
    task="seq2seq",
    input=dict(data=TOKENS, pp=SPANS, batch_size=16),
    model_name="t5",
    model=dict(
      **dict(vocab_size=24, width=8, num_heads=2, depth=2, decoder_depth=2),
      **dict(head_dim=3, mlp_dim=12, mlp="geglu", tied_head=False),
      **model,
    ),
    optimizer=dict(name="adafactor"),
    evals=dict(val=evaluation | dict(log_steps=3)),
  )


def decoder():
  data = TOKENS | dict(length=16)
  evaluation = dict(type="perplexity", pred="perplexity", data=data)
  return base(
    task="language_modeling",
    input=dict(data=data, batch_size=16),
    model_name="decoder",
    model=dict(variant="llama", vocab_size=24, **SIZES),
    evals=dict(val=evaluation | dict(log_steps=3)),
  )


def vit():
  data = dict(type="arrays", name="digits", split="train")
  evaluation = dict(type="classification", pred="logits", data=data, pp=DIGITS)
  return base(
    task="classification",
    input=dict(data=data, pp=DIGITS, batch_size=16),
    model_name="vit",
    model=dict(num_classes=10, patch_size=4, **SIZES),
    evals=dict(
      val=evaluation | dict(log_steps=3, batch_size=8, num_examples=8)
    ),
  )


def cappa():
  model = dict(vocab_size=16, patch_size=4, decoder_depth=1, max_len=6)
  return base(
    task="captioning",
    input=dict(data=CAPTIONS, batch_size=8),
    model_name="cappa",
    model=model | SIZES,
    evals={},
  )


def siglip():
  image = dict(patch_size=4, pool_type="map", **SIZES)
  return base(
    task="contrastive",
    input=dict(data=CAPTIONS, batch_size=8),
    model_name="two_towers",
    model=dict(
      image=image, text=dict(vocab_size=16, **SIZES), out_dim=(None, 16)
    ),
    evals={},
  )


def coca():
  config, loss = cappa(), dict(kind="softmax", caption_weight=2.0)
  return config | dict(model_name="coca", task="contrastive", loss=loss)


def config_of(row):
  """The config that a row's lines belong to."""
  special = {"CapPa:": cappa, "SigLIP:": siglip, "ViT:": vit, "Swin": vit}
  special |= dict.fromkeys(("`model.coca`", "`loss.nce_loss`"), coca)
  word = row.there.split()[0]
  if word in special:
    return special[word]()
  if row.table == "T5X: mixture of experts":
    return t5(moe=dict(num_experts=8, top_k=1, capacity_factor=1.5))
  by_trainer = dict(T5X=t5, big_vision=vit)
  return by_trainer.get(row.table.partition("'")[0], decoder)()


@pytest.fixture(scope="module")
def pretrained(folder):
  """Files of parameters: pretrained.npz, vit.npz and tower.npz."""

  def save(name, model, *inputs):
    variables = model.init(jax.random.key(0), *inputs)
    arrays = dict(trees.flatten_with_names(variables["params"]))
    np.savez(folder / f"{name}.npz", **arrays)

  tokens = np.zeros((1, 16), np.int32)
  save("pretrained", decoder_lib.Model(**decoder()["model"]), tokens)
  gray, color = (np.zeros((1, 8, 8, n), np.float32) for n in (1, 3))
  save("vit", vit_lib.Model(**vit()["model"]), gray)
  tower = siglip()["model"]["image"]
  save("tower", vit_lib.Model(num_classes=7, **tower), color)


class StartedError(Exception):
  """The run has come to its first step."""


def with_lines(row):
  """The config of a row with its lines."""
  config = ml_collections.ConfigDict(copy.deepcopy(config_of(row)))
  with config.ignore_type(), config.unlocked():
    for line in row.lines:
      exec(line, {"config": config})
  return config


def run(row, workdir, monkeypatch):
  """Starts the config of a row; returns the names of what was traced."""
  config, traced = with_lines(row), []
  if "eval_only" in config:
    results = main.train(config, str(workdir))
    return ["update", *{name.split("/")[0] for name in results}]

  def trace(self, name, fn, *specs, **options):
    traced.append(name)
    jax.eval_shape(fn, *specs)
    return lambda: None

  def compile(self, name, fn, *specs, **options):
    trace(self, name, fn, *specs)

  built = []
  from_config = main.evaluations.from_config

  def build_all(*args, **options):
    built.extend(from_config(*args, **options))
    return built

  def build(run, update_fn, specs, compile_update):
    trace(None, "update", update_fn, *specs)
    for evaluation in built:
      evaluation.build()
    return "built"

  programs = main.programs.Programs
  if "eager" not in config:
    monkeypatch.setattr(programs, "compile", compile)
  monkeypatch.setattr(main.evaluations, "from_config", build_all)
  assert main.train(config, str(workdir), on_update=build) == "built"
  if "model_init" in config:  # The parameters are loaded, too.
    lower = programs.lower

    def all_but_the_update(self, name, *args, **options):
      return lower(self, name, *args, **options) if name != "update" else str

    def started(*args, **options):
      raise StartedError

    monkeypatch.setattr(programs, "lower", all_but_the_update)
    monkeypatch.setattr(main.record, "start", started)
    with pytest.raises(StartedError):
      main.train(config, str(workdir))
  return traced


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.lines], ids=str)
def test_the_lines_run(row, folder, pretrained, tmp_path, monkeypatch):
  monkeypatch.chdir(folder)
  traced = run(row, tmp_path / "run", monkeypatch)
  config = with_lines(row)
  assert traced[0] == "update"
  if "eager" not in config:
    enabled = {n for n, e in config.evals.items() if e.get("enabled", True)}
    assert enabled <= {*traced}


@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_first_lines_of_each_table_start(
  table, folder, tmp_path, monkeypatch
):
  """The quick part of the test above."""
  monkeypatch.chdir(folder)
  row = next(row for row in ROWS if row.table == table and row.lines)
  traced = run(row, tmp_path / "run", monkeypatch)
  assert {"update", *with_lines(row).evals} <= {*traced}


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_config_of_each_table_trains(table, folder, tmp_path, monkeypatch):
  monkeypatch.chdir(folder)
  row = next(row for row in ROWS if row.table == table)
  config = config_of(row) | dict(stop_at_steps=2, evals={})
  results = main.train(config, str(tmp_path))
  assert results["step"] == 2 and np.isfinite(results["loss"])


# The other trainers' formulas.


def lines_of(table, start, part=0):
  rows = [r for r in ROWS if r.table == table and r.there.startswith(start)]
  return with_lines(rows[part])


def together(table, starts):
  """The config of a table with the lines of several rows."""
  rows = [r for r in ROWS if r.table == table and r.there.startswith(starts)]
  assert len(rows) == len(starts)
  lines = [line for row in rows for line in row.lines]
  return with_lines(rows[0]._replace(lines=tuple(lines)))


def units(total):
  return lengths.Units(batch_size=16, total_steps=total)


def cosine(p):
  return (1 + math.cos(math.pi * p)) / 2


def torch_one_cycle(s, total=600_000, start=1 / 10, end=1 / 10):
  top = 0.01 * total - 1
  if s <= top:
    return start + (1 - start) * (1 - cosine(s / top))
  return end + (1 - end) * cosine((s - top) / (total - 1 - top))


# (table, beginning of a row's first cell, part of the row, total steps, steps
# to compare, the other trainer's factor at a step).
SCHEDULES = [
  (
    "T5X",
    "`learning_rate_fn`",
    0,
    100_000,
    range(10_000, 100_000, 999),
    # Of lr = base / 100.
    lambda s: 100 / math.sqrt(max(s, 10_000)),
  ),
  (
    "T5X",
    "`linear_warmup * linear_decay`",
    0,
    11_000,
    range(0, 11_000, 97),
    lambda s: min(s / 1000, 1 + (1000 - s) / 10_000),
  ),
  (
    "T5X",
    "`linear_warmup * linear_decay`",
    1,
    11_000,
    range(0, 11_000, 97),
    lambda s: min(s / 1000, 1) * cosine(max(0, s - 1000) / 10_000),
  ),
  (
    "T5X",
    "`decay_every`",
    0,
    60_000,
    range(0, 60_000, 500),
    lambda s: 0.5 ** (s // 20_000),
  ),
  (
    "LiBai",
    "`WarmupStepLR`",
    0,
    1000,
    range(1000),
    lambda s: 0.1 ** ((s >= 500) + (s >= 800)),
  ),
  (
    "Modalities",
    "`scheduler.onecycle_lr",
    0,
    600_000,
    range(0, 600_000, 1999),
    torch_one_cycle,
  ),
  (
    "Modalities",
    "`scheduler.cosine_annealing_lr`",
    0,
    1100,
    range(100, 1100),
    lambda s: 0.1 + 0.9 * cosine((s - 100) / 1000),
  ),
  (
    "Modalities",
    "`scheduler.linear_lr",
    0,
    1000,
    range(1000),
    lambda s: 0.25 + (1 - 0.25) * min(s, 100) / 100,
  ),
  (
    "Modalities",
    "`scheduler.constant_lr",
    0,
    1000,
    range(1000),
    lambda s: 0.25 if s < 100 else 1.0,
  ),
  ("Modalities", "`scheduler.constant_lr", 1, 9, range(9), lambda s: 1.0),
  (
    "Modalities",
    "`scheduler.step_lr",
    0,
    90,
    range(90),
    lambda s: 0.1 ** (s // 30),
  ),
]


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case[1][1:])
def test_schedules_are_those_of_the_other_trainer(case):
  table, start, part, total, steps, formula = case
  config = lines_of(table, start, part)
  ours = schedules.make(config.schedule.to_dict(), units(total))
  np.testing.assert_allclose(
    [ours(s) for s in steps], [formula(s) for s in steps], atol=1e-9
  )


def test_libais_cosine_is_lower_by_what_the_page_says():
  config = lines_of("LiBai", "`WarmupCosineLR")
  ours = schedules.make(config.schedule.to_dict(), units(1000))
  theirs = lambda s: 0.01 + 0.99 * cosine(s / 1000)
  more = [ours(s) - theirs(s) for s in range(50, 1000)]
  assert 0.04 < max(more) < 0.05 and min(more) > -1e-12


SHAPES = {
  "blocks_0/attention_norm/scale": (6,),
  "blocks_0/attention_norm/bias": (6,),
  "blocks_0/mlp/up/kernel": (6, 5),
  "blocks_0/mlp/up/bias": (5,),
  "token_embedding": (7, 6),
}


def arrays(step):
  rng = np.random.default_rng(step)
  return {n: rng.normal(size=s) for n, s in SHAPES.items()}


def trained(config, steps=5):
  """Parameters after some steps of a row's optimizer, by name."""
  keys = [k for k in config if k.split("_")[0] in OPTIMIZER_KEYS]
  chosen = settings.Config({k: config.to_dict()[k] for k in keys})
  tree = lambda step: trees.from_flat(
    {n: jnp.asarray(x, jnp.float32) for n, x in arrays(step).items()}
  )
  params = tree(0)
  optimizer = chain.make(chosen, params, units(10))
  state = optimizer.tx.init(params)
  for step in range(steps):
    updates, state = optimizer.tx.update(
      tree(step + 1), state, params, step=step, loss=(1.0, 1.0)
    )
    params = optax.apply_updates(params, updates)
  return dict(trees.flatten_with_names(params))


OPTIMIZER_KEYS = ("optimizer", "lr", "wd", "schedule", "grad")


def check_trained(config, expected):
  for name, value in trained(config).items():
    np.testing.assert_allclose(
      value, expected[name], atol=2e-6, rtol=2e-6, err_msg=name
    )


def adamw(b1, b2, eps, lr, wd, decays, steps=5):
  """AdamW of PyTorch and OneFlow."""
  params, m, v = arrays(0), {}, {}
  for t in range(1, steps + 1):
    for n, g in arrays(t).items():
      params[n] = params[n] * (1 - lr * (wd if decays(n) else 0))
      m[n] = b1 * m.get(n, 0) + (1 - b1) * g
      v[n] = b2 * v.get(n, 0) + (1 - b2) * g * g
      scale = np.sqrt(v[n] / (1 - b2**t)) + eps
      params[n] = params[n] - lr * m[n] / (1 - b1**t) / scale
  return params


def test_adamw_is_libais():
  rows = ("`optim = LazyCall", "`weight_decay`", "`weight_decay_norm")
  config = together("LiBai", rows)
  decays = lambda name: not name.endswith(("scale", "bias"))
  check_trained(config, adamw(0.9, 0.999, 1e-8, 1e-4, 0.01, decays))


def test_adamw_is_that_of_modalities():
  config = together("Modalities", ("`optimizer.adam_w", "`weight_decay_groups"))
  groups = (".mlp", ".attn")  # "linear"; the others are excluded.
  decays = lambda name: any(g in name.replace("/", ".") for g in groups)
  check_trained(config, adamw(0.9, 0.95, 1e-8, 1e-4, 0.1, decays))


def t5x_adafactor(lr, beta1=None, wd=None, clip=None, steps=5):
  """T5X's update of arrays that are too small to be factored."""
  params, m, v = arrays(0), {}, {}
  for t in range(steps):
    grads = arrays(t + 1)
    if clip is not None:
      norm = math.sqrt(sum(np.sum(g * g) for g in grads.values()))
      grads = {n: g * min(1, clip / norm) for n, g in grads.items()}
    decay = 1 - (t + 1) ** -0.8
    for n, g in grads.items():
      p = params[n]
      v[n] = decay * v.get(n, 0) + (1 - decay) * (g * g + 1e-30)
      y = g / np.sqrt(v[n])
      y /= max(1, math.sqrt(np.mean(y * y)))
      y *= lr(t) * max(math.sqrt(np.mean(p * p)), 1e-3)
      if beta1 is not None:
        y = m[n] = beta1 * m.get(n, 0) + (1 - beta1) * y
      params[n] = p * (1 - (wd or 0)) - y
  return params


ADAFACTOR = {
  "`adafactor.Adafactor`": {},
  "`Adafactor.beta1`": dict(beta1=0.9),
  "`Adafactor.weight_decay_rate`": dict(wd=1e-3),
  "`Adafactor.global_norm_clip_threshold`": dict(clip=1.0),
}


@pytest.mark.parametrize("start", ADAFACTOR)
def test_adafactor_is_that_of_t5x(start):
  options, config = ADAFACTOR[start], lines_of("T5X", start)
  lr = lambda step: 0.01
  if "wd" not in options:  # Which follows the schedule here.
    config.schedule = dict(decay_type="linear")
    lr = lambda step: 0.01 * (1 - step / 10)
  check_trained(config, t5x_adafactor(lr, **options))


@pytest.mark.parametrize("part", [0, 1])
def test_clipping_is_that_of_modalities(part):
  config = lines_of("Modalities", "`norm_type: MAX_NORM`", part)
  config.optimizer, config.lr = dict(name="sgd"), 1.0
  expected = arrays(0)
  for step in range(1, 6):
    sizes = np.abs(np.concatenate([g.ravel() for g in arrays(step).values()]))
    norm = [sizes.max(), sizes.sum()][part]
    for name, g in arrays(step).items():
      expected[name] -= g * min(1, 1.0 / norm)
  check_trained(config, expected)


def test_a_fresh_state_has_no_offset():
  config = lines_of("T5X", "`adafactor.Adafactor`")
  config.optimizer.decay_offset = 1_000_000
  with pytest.raises(ConfigError, match="expected config.resume"):
    trained(config)
