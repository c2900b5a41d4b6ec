"""The tool that predicts files and folders."""

import csv
import json

import jax
import numpy as np
import pytest
from support import saved_models

import bigtrain
from bigtrain.config.errors import ConfigError
from bigtrain.tools import predict as tool


@pytest.fixture(scope="module")
def run(picture_run):
  return str(picture_run / "runs" / "mine")


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(monkeypatch):
  monkeypatch.setattr(tool.jax_flags, "use_compile_cache", lambda folder: "")


def call(*words):
  return tool.main(list(map(str, words)))


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_gives_a_row_for_each_picture(
  run, picture_run, tmp_path, monkeypatch
):
  monkeypatch.chdir(picture_run)
  out = tmp_path / "out.jsonl"
  # The second folder is part of the first one.
  assert call(run, "val", "val/owl", f"--output={out}", "--batch_size=8") == 0
  rows = read(out)
  assert [row["path"] for row in rows] == [
    f"val/{name}/{i}.png" for name in ("cat", "dog", "owl") for i in range(3)
  ]
  for row in rows:
    assert row["label"] == row["path"].split("/")[1] and row["step"] == 30
    assert len(row["top"]) == 3


def test_hidden_files_are_no_pictures(tmp_path):
  for name in ("b/1.png", "._2.png", ".ipynb_checkpoints/3.png", "Thumbs.db"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
  picture = str(tmp_path / "b/1.png")
  assert tool.find_files([str(tmp_path)], (".png", ".db")) == [picture]
  named = str(tmp_path / "._2.png")  # By its name, it is read.
  assert tool.find_files([named], (".png",)) == [named]


def test_a_second_call_continues_the_output(
  run, picture_run, tmp_path, monkeypatch
):
  out = tmp_path / "out.csv"
  folder = picture_run / "val"
  words = [run, folder, f"--output={out}", "--top_k=1"]
  assert call(*words) == 0
  text = out.read_text()
  rows = list(csv.DictReader(text.splitlines()))
  assert [row["label"] for row in rows] == 3 * ["cat"] + 3 * ["dog"] + 3 * [
    "owl"
  ]
  # Killed within the eighth row.
  lines = text.splitlines(keepends=True)
  out.write_text("".join(lines[:8]) + lines[8][:10])
  seen = []
  monkeypatch.setattr(tool, "predict", _spy(tool.predict, seen))
  assert call(*words) == 0
  assert out.read_text() == text and seen == [7]
  # All rows are there.
  assert call(*words) == 0
  assert out.read_text() == text and seen == [7, 9]


def rows_of(path, *added):
  rows = tool.Results(str(path), 1, ("text",))
  rows.write([{"path": name, "step": 1, "text": x} for name, x in added])
  return rows


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_texts_with_ends_of_lines_are_continued(tmp_path, kind):
  out = tmp_path / f"out.{kind}"
  added = [(name, f'"{name}"\n\u2028x\x85\u2029\n,y\n') for name in "abc"]
  rows_of(out, *added)
  whole = out.read_bytes()
  last = whole.rfind(b"c,1" if kind == "csv" else b'{"path": "c"')
  for size in range(last, len(whole)):
    out.write_bytes(whole[:size])
    rows = rows_of(out)
    assert rows.done == {"a", "b"}
    rows.write([{"path": "c", "step": 1, "text": added[2][1]}])
    assert out.read_bytes() == whole


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize(
  "text", ['{"prompt": "a"}\n{"prompt"', '{"prompt": "a"}', "[1]\n2", "1\n"]
)
def test_another_file_is_not_changed(tmp_path, kind, text):
  out = tmp_path / f"out.{kind}"
  out.write_text(text)
  with pytest.raises(ConfigError, match="not an output of this tool"):
    rows_of(out)
  assert out.read_text() == text


def test_names_of_shards():
  assert tool.shard_of("1/4", "runs.v1/out")[1] == "runs.v1/out"
  assert tool.shard_of("1/4", "a.b/o.csv")[1] == "a.b/o-1-of-4.csv"


def _spy(predict, seen):
  def spy(predictor, files, rows, **options):
    seen.append(len(rows.done))
    return predict(predictor, files, rows, **options)

  return spy


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_damaged_picture_does_not_stop_the_others(
  run, picture_run, tmp_path, capsys, kind
):
  bad = tmp_path / "bad.png"
  bad.write_bytes(b"no picture")
  good = picture_run / "val" / "dog" / "0.png"
  assert call(run, bad, good, f"--output={kind}") == 1
  output = capsys.readouterr()
  lines = output.out.splitlines()
  if kind == "csv":
    first, second = csv.DictReader(lines)
  else:
    first, second = map(json.loads, lines)
  assert first["path"] == str(bad) and "Unknown image" in first["error"]
  assert second["label"] == "dog"
  assert output.err == "error: 1 file(s) cannot be read.\n"


def test_embeddings(run, picture_run, capsys):
  picture = picture_run / "val" / "dog" / "0.png"
  assert call(run, picture, "--method=embed_images") == 0
  row = json.loads(capsys.readouterr().out)
  assert len(row["embedding"]) == 32 and "label" not in row


@pytest.mark.parametrize(
  "words, message",
  [
    (["none"], "none: no such file or folder"),
    (["{folder}/runs"], "contains no files of type .jpg"),
    (["{folder}/val", "--output=x.txt"], "expected jsonl, csv, or a file"),
    (["{folder}/val", "--method=clasify"], "did you mean 'classify'"),
    (["{folder}/val", "--method=caption"], "cannot do this"),
    (["{folder}/val", "--method=embed_images", "--top_k=2"], "has no classes"),
    (["{folder}/val", "--stp=3"], "unknown argument"),
    (["{folder}/val", "--output={old}"], "has results of step 7"),
    (["{folder}/val", "--output={old}.csv"], "expected the columns path, step"),
  ],
)
def test_mistakes_give_a_one_line_error(
  run, picture_run, tmp_path, words, message, capsys
):
  old = tmp_path / "old.jsonl"
  old.write_text('{"path": "a.png", "step": 7}\n')
  (tmp_path / "old.jsonl.csv").write_text("a,b\n1,2\n")
  words = [w.format(folder=picture_run, old=old) for w in words]
  assert call(run, *words) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ") and error.count("\n") == 1
  assert message.lower() in error.lower()


# Lines of .jsonl files.

SIZES = dict(width=8, depth=1, num_heads=2, mlp_dim=8, vocab_size=259)
TASKS = {
  "language_modeling": dict(
    task="language_modeling",
    model_name="decoder",
    model=dict(variant="gpt2", max_len=32, init_std=1.0, **SIZES),
    input=dict(data=dict(type="text", path="x.txt"), batch_size=4),
  ),
  "seq2seq": dict(
    task="seq2seq",
    model_name="t5",
    model=dict(variant="t5_1_1", **SIZES),
    input=dict(data=dict(type="text", path="x.txt"), batch_size=4),
  ),
}


@pytest.fixture(
  scope="module",
  params=[
    "language_modeling",
    pytest.param("seq2seq", marks=pytest.mark.slow),
  ],
)
def texts_run(request, tmp_path_factory):
  """(folder of a model of texts, its predict functions)."""
  folder = tmp_path_factory.mktemp("texts")
  seq2seq = request.param == "seq2seq"
  names = ("inputs", "targets") if seq2seq else ("tokens",)
  features = dict.fromkeys(names, ((8,), "int32"))
  reference = saved_models.saved(folder, TASKS[request.param], **features)
  return folder, reference


def is_seq2seq(folder):
  return bigtrain.load(folder).config["task"] == "seq2seq"


@pytest.fixture
def questions(tmp_path):
  path = tmp_path / "questions.jsonl"
  rows = [
    dict(id=i, question="ab" * (1 + i % 3), answer="xyz"[: 1 + i % 3])
    for i in range(10)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path, rows


def test_given_answers_are_scored(texts_run, questions, tmp_path):
  folder, reference = texts_run
  path, rows = questions
  out = tmp_path / "out.jsonl"
  words = ["--method=score", "--prompt_key=question", f"--output={out}"]
  assert call(folder, path, *words) == 0
  found = read(out)
  assert [row["path"] for row in found] == [f"{path}:{i}" for i in range(1, 11)]
  assert [row["row"] for row in found] == rows
  ids = lambda text: [byte + 3 for byte in text.encode()]
  for row, result in list(zip(rows, found))[:3]:
    prompt, answer = ids(row["question"]), ids(row["answer"])
    if is_seq2seq(folder):
      answer = [*answer, 2]
      batch = dict(inputs=[[*prompt, 2]], targets=[answer])
    else:
      batch = dict(tokens=[[*prompt, *answer][:-1]])
    batch = {name: np.asarray(x, np.int32) for name, x in batch.items()}
    logits = reference("logits", batch)[0][-len(answer) :]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    expected = log_probs[np.arange(len(answer)), answer].sum()
    assert result["log_likelihood"] == pytest.approx(expected, abs=1e-4)
    assert result["tokens"] == len(answer)
    assert result["greedy"] == (log_probs.argmax(-1) == answer).all()


@pytest.mark.slow
def test_a_killed_job_in_shards_gives_the_whole_output(
  texts_run, questions, tmp_path
):
  folder, _ = texts_run
  path, _ = questions
  length = "max_len" if is_seq2seq(folder) else "max_new"
  words = [folder, path, "--prompt_key=question", "--scores", "--batch_size=8"]
  words.append(f"--options={json.dumps({length: 5, 'temperature': 0.5})}")
  whole = tmp_path / "whole.jsonl"
  assert call(*words, f"--output={whole}") == 0
  lines = whole.read_text().splitlines(keepends=True)
  killed = tmp_path / "killed.jsonl"
  killed.write_text("".join(lines[:3]) + lines[3][:9])
  assert call(*words, f"--output={killed}") == 0
  assert killed.read_text() == whole.read_text()
  # The generated text is scored up to its end token.
  for row in read(whole):
    assert row["log_likelihood"] < 0 and 1 <= row["tokens"] <= 5
  shards = []
  for i in range(3):
    assert (
      call(*words, f"--output={tmp_path / 's.jsonl'}", f"--shard={i}/3") == 0
    )
    shards += read(tmp_path / f"s-{i}-of-3.jsonl")
  by_path = {row["path"]: row for row in shards}
  assert len(shards) == 10
  for row in read(whole):
    assert by_path[row["path"]]["text"] == row["text"]
    assert by_path[row["path"]]["log_likelihood"] == pytest.approx(
      row["log_likelihood"], abs=1e-4
    )


def test_mistakes_in_lines(run, texts_run, questions, tmp_path, capsys):
  folder, _ = texts_run
  path, _ = questions
  bad = tmp_path / "bad.jsonl"
  bad.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
  latin = tmp_path / "latin.jsonl"
  latin.write_bytes(b'{"prompt": "\xe9"}\n')
  good = tmp_path / "good.jsonl"
  good.write_text('{"prompt": "a"}\n')
  for words, message in (
    ([folder, path], "questions.jsonl:1: expected a JSON object with prompt"),
    ([folder, bad], "bad.jsonl:2: prompt: expected texts."),
    ([folder, latin], "latin.jsonl:1: expected a JSON object with prompt"),
    ([folder, good, "--shard=2/2"], "expected i/n with i from 0 to n - 1"),
    ([folder, good, "--options=3"], "--options: expected a JSON object"),
    ([run, bad], "classify reads pictures"),
  ):
    assert call(*words) == 2
    assert message in capsys.readouterr().err
