"""docs/coming_from.md: every config line is applied to a small run.

A row's lines are run in a config of its table, in a folder that has the files
that they name. The run starts up to its first step: input, model, optimizer,
update, evaluations and hooks are built and traced, initial parameters are
loaded, and every key has been read.
"""

import copy
import itertools
import pathlib
import pickle
import re
import struct
import tarfile
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
import pytest
from support import compile_cache

from bigtrain import main, trees
from bigtrain.models import decoder as decoder_lib
from bigtrain.models import vit as vit_lib

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/coming_from.md").read_text()
TABLES = {"T5X", "T5X: mixture of experts", "big_vision", "LiBai", "Modalities"}


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


def test_the_page_has_the_five_tables():
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
  with tarfile.open(ROOT / "tests/golden/old_checkpoints.tar.gz") as archive:
    archive.extractall(folder, filter="data")
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


def config_of(row):
  """The config that a row's lines belong to."""
  special = {"CapPa:": cappa, "SigLIP:": siglip, "ViT:": vit}
  word = row.there.split()[0]
  if word in special:
    return special[word]()
  if row.table == "T5X: mixture of experts":
    return t5(moe=dict(num_experts=8, top_k=1, capacity_factor=1.5))
  return dict(T5X=t5, big_vision=vit).get(row.table, decoder)()


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


def run(row, workdir, monkeypatch):
  """Starts the config of a row with its lines, up to the first step."""
  config = ml_collections.ConfigDict(copy.deepcopy(config_of(row)))
  with config.ignore_type(), config.unlocked():
    for line in row.lines:
      exec(line, {"config": config})

  def started(*args, **options):
    raise StartedError

  if "eval_only" in config:
    main.train(config, str(workdir))
    return
  if "model_init" in config:  # The parameters are loaded, too.
    lower = main.programs.Programs.lower

    def all_but_the_update(self, name, *args, **options):
      if name == "update":
        return lambda: None
      return lower(self, name, *args, **options)

    monkeypatch.setattr(main.programs.Programs, "lower", all_but_the_update)
    monkeypatch.setattr(main.record, "start", started)
  else:
    monkeypatch.setattr(main.folders, "check_writable", started)
  with pytest.raises(StartedError):
    main.train(config, str(workdir))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.lines], ids=str)
def test_the_lines_run(row, folder, pretrained, tmp_path, monkeypatch):
  monkeypatch.chdir(folder)
  run(row, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_first_lines_of_each_table_start(
  table, folder, tmp_path, monkeypatch
):
  """The quick part of the test above."""
  monkeypatch.chdir(folder)
  row = next(row for row in ROWS if row.table == table and row.lines)
  run(row, tmp_path / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_config_of_each_table_trains(table, folder, tmp_path, monkeypatch):
  monkeypatch.chdir(folder)
  row = next(row for row in ROWS if row.table == table)
  config = config_of(row) | dict(stop_at_steps=2, evals={})
  results = main.train(config, str(tmp_path))
  assert results["step"] == 2 and np.isfinite(results["loss"])
