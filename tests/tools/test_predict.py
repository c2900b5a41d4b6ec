"""The tool that predicts files and folders."""

import csv
import json

import pytest

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
    (["{folder}/val", "--output={old}"], "has rows of step 7"),
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
