"""Rows and pictures in object stores, and rows with videos or sounds."""

import json
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.files import objects

STORES = ["gs_bucket", pytest.param("s3_bucket", marks=pytest.mark.cluster)]
# A small tokenizer with a chat template, and an image processor.
FOLDER = str(
  pathlib.Path(__file__).parents[1] / "golden" / "picture_processors/qwen3_vl"
)
PICTURES = dict(tokens=3, pp="value_range(0, 1)")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(value, side=4):
  from bigtrain.pp.host_tensorflow import tf

  return tf.io.encode_png(np.full((side, side, 3), value, np.uint8)).numpy()


def row(*images, **others):
  return dict(prompt="left?", completion="7", images=images) | others


def lines(*rows):
  return "".join(json.dumps(x) + "\n" for x in rows).encode()


def source(path, **options):
  return supervised.Source("bytes", 40, path, pictures=PICTURES, **options)


def shown(source, index):
  """Values of the pictures of an example."""
  return source.read(np.asarray([index]))["image"][0, :, 0, 0, 0] * 255


@pytest.mark.parametrize("store", STORES)
def test_rows_and_pictures_are_in_an_object_store(store, request, tmp_path):
  bucket = request.getfixturevalue(store)
  for value in (1, 2, 3):
    objects.write(f"{bucket}/a/images/{value}.png", png(value))
  remote = lines(
    row("../images/1.png", "../images/2.png"),
    row(f"{bucket}/a/images/3.png"),
  )
  objects.write(f"{bucket}/a/rows/x.jsonl", remote)
  path = tmp_path / "x.jsonl"
  path.write_bytes(
    lines(
      row(f"{bucket}/a/images/1.png", f"{bucket}/a/images/2.png"),
      row(f"{bucket}/a/images/3.png"),
    )
  )
  for each in (
    str(path),
    f"{bucket}/a/rows/x.jsonl",
    f"{bucket}/a/rows/",
    f"{bucket}/a/rows/*.jsonl",
  ):
    made = source(each)
    assert shown(made, 0).tolist() == pytest.approx([1, 2])
    assert shown(made, 1).tolist() == pytest.approx([3, 0])
  # Tokens are those of an earlier run; pixels are read again.
  objects.write(f"{bucket}/a/images/3.png", png(9))
  again = source(f"{bucket}/a/rows/x.jsonl")
  assert again.fingerprint() == made.fingerprint()
  assert shown(again, 1).tolist() == pytest.approx([9, 0])
  objects.write(f"{bucket}/a/images/3.png", None)
  with pytest.raises(DataError, match=r"x.jsonl, row 1 .*3.png: No such"):
    again.read(np.asarray([0, 1]))


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([row(), row("no.png")], "rows.jsonl, line 2: .*no.png: No such object"),
    ([row("cut.png")], "line 1: .*cut.png: the file is cut off"),
    ([row("https://x.org/a.png")], "line 1: .*kind of storage 'https'.*s3://"),
    ([row("../../../a.png")], "line 1: .*a.png: leaves the bucket of gs://"),
    (b"{", "rows.jsonl, line 1: not valid JSON"),
  ],
)
def test_mistakes_in_a_bucket_have_their_place(rows, message, gs_bucket):
  folder = f"{gs_bucket}/mistakes"
  objects.write(f"{folder}/cut.png", png(1)[:-9])
  content = rows if isinstance(rows, bytes) else lines(*rows)
  objects.write(f"{folder}/rows.jsonl", content)
  with pytest.raises(DataError, match=message):
    source(f"{folder}/rows.jsonl")


def test_files_that_a_bucket_lacks(gs_bucket):
  with pytest.raises(ConfigError, match=r"no.jsonl: no such object"):
    source(f"{gs_bucket}/no.jsonl")
  with pytest.raises(ConfigError, match=r"none/\*.jsonl'?: no such file"):
    source(f"{gs_bucket}/none/*.jsonl")


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.parquet", "x.json"])
def test_formats_of_rows_in_a_bucket(name, gs_bucket, tmp_path):
  import gzip

  import pyarrow as pa
  from pyarrow import parquet

  file = tmp_path / name
  image = {"bytes": png(5), "path": None}
  if name.endswith("parquet"):
    columns = dict(prompt=["left?"], completion=["7"], images=[[image]])
    parquet.write_table(pa.table(columns), file)
  else:
    objects.write(f"{gs_bucket}/formats/5.png", png(5))
    content = json.dumps([row("5.png")]).encode()
    if name.endswith("gz"):
      content = gzip.compress(lines(row("5.png")))
    file.write_bytes(content)
  objects.write(f"{gs_bucket}/formats/{name}", file.read_bytes())
  made = source(f"{gs_bucket}/formats/{name}")
  assert shown(made, 0).tolist() == pytest.approx([5])


def test_pictures_in_data_urls(tmp_path):
  import base64

  url = "data:image/png;base64," + base64.b64encode(png(8)).decode()
  part = {"type": "image_url", "image_url": {"url": url}}
  path = tmp_path / "rows.jsonl"
  path.write_bytes(lines(row(url), row(url[:-5] + "#")))
  with pytest.raises(DataError, match="line 2: the picture data:.*not valid"):
    source(str(path))
  chat = [
    {"role": "user", "content": [part, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": "7"},
  ]
  path.write_bytes(lines(dict(messages=chat)))
  made = supervised.Source(FOLDER, 80, str(path), pictures=FOLDER)
  assert made.read(np.asarray([0]))["shapes"].tolist() == [[[4, 4]]]


def chat(*parts):
  question = {
    "role": "user",
    "content": [*parts, {"type": "text", "text": "?"}],
  }
  return dict(messages=[question, {"role": "assistant", "content": "7"}])


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    (row(videos=["a.mp4"]), "line 2: videos: .* would not see it"),
    (row(audio={"bytes": "x", "path": None}), "line 2: audio: "),
    (
      chat({"type": "video", "video": "a.mp4"}),
      r"line 2: messages\[0\]: content\[0\]: video: ",
    ),
    (
      chat({"type": "input_audio", "input_audio": {"data": ""}}),
      r"content\[0\]: input_audio: ",
    ),
    (
      dict(
        video="a.mp4",
        conversations=[
          {"from": "human", "value": "?"},
          {"from": "gpt", "value": "7"},
        ],
      ),
      "line 2: video: ",
    ),
  ],
)
@pytest.mark.parametrize("pictures", [None, FOLDER])
def test_videos_and_sounds_are_refused(bad, message, pictures, tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(lines(row(videos=[], audio=None), bad))
  with pytest.raises(DataError, match=message):
    supervised.Source(FOLDER, 80, str(path), pictures=pictures)
