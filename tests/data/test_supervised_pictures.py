"""Supervised rows with pictures: ids and pixels, packing, and mistakes."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.pp import torch_resizing
from bigtrain.text import picture_layouts, tokenizers
from bigtrain.text import pictures as text_pictures

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "picture_processors"
QUESTION = "what is left of the three"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(array):
  from bigtrain.pp.host_tensorflow import tf

  return tf.io.encode_png(array).numpy()


def write(tmp_path, rows, pictures=()):
  for name, content in pictures:
    (tmp_path / name).write_bytes(content)
  file = tmp_path / "rows.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(file)


def reference(family):
  return dict(np.load(GOLDEN / family / "reference.npz"))


def files_of(family):
  expected = reference(family)
  return [(f"{i}.png", png(expected[f"picture {i}"])) for i in range(2)]


def source_of(family, path, length=64, **options):
  folder = str(GOLDEN / family)
  return supervised.Source(
    folder, length, path, pictures=folder, allow_special=False, **options
  )


IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": QUESTION}
ANSWER = {"role": "assistant", "content": "a seven"}
CHATS = {
  "parts": dict(
    images=["0.png", "1.png"],
    messages=[{"role": "user", "content": [IMAGE, IMAGE, TEXT]}, ANSWER],
  ),
  "parts with paths": dict(
    messages=[
      {
        "role": "user",
        "content": [
          IMAGE | {"path": "0.png"},
          {"type": "image_url", "image_url": {"url": "1.png"}},
          TEXT,
        ],
      },
      ANSWER,
    ],
  ),
  "no places": dict(
    images=["0.png", "1.png"],
    messages=[{"role": "user", "content": QUESTION}, ANSWER],
  ),
}


# All forms of chats for these, and one for the others.
FAMILIES = (
  *("gemma3", "gemma4", "llava", "llava_next", "llava_onevision"),
  *("qwen3_vl", "smolvlm"),
)
OTHERS = (
  *("vipllava", "deepseek_vl", "exaone4_5", "mistral3", "llava_pixtral"),
  *("lighton_ocr", "internvl", "aya_vision", "cohere2_vision"),
)


@pytest.mark.golden
@pytest.mark.parametrize(
  ("family", "form"),
  [
    *((family, form) for family in FAMILIES for form in CHATS),
    *((family, "parts") for family in OTHERS),
  ],
)
def test_chats_have_the_ids_and_pixels_of_transformers(family, form, tmp_path):
  path = write(tmp_path, [CHATS[form]], files_of(family))
  expected = reference(family)
  batch = source_of(family, path, length=250).read(np.asarray([0]))
  ids = expected["ids"]
  number = len(ids) - 1
  np.testing.assert_array_equal(batch["tokens"][0, :number], ids[:-1])
  np.testing.assert_array_equal(batch["targets"][0, :number], ids[1:])
  assert not batch["tokens"][0, number:].any()
  close = dict(rtol=0, atol=1e-6)
  if "grids" not in expected:
    np.testing.assert_allclose(batch["image"][0], expected["pixels"], **close)
    return
  grids = expected["grids"][:, 1:]
  np.testing.assert_array_equal(batch["shapes"][0], grids)
  counts = grids.prod(axis=1)
  rest = batch["image"].shape[2] - counts.max()
  assert 0 <= rest < 16  # With partial squares, up to whole ones.
  patches = np.split(expected["patches"], np.cumsum(counts)[:-1])
  for image, own, count in zip(batch["image"][0], patches, counts):
    np.testing.assert_array_equal(image[:count], own)
    assert not image[count:].any()


def of_folder(folder):
  tokenizer = tokenizers.get(str(folder))
  return text_pictures.of_folder(str(folder), tokenizer, "pictures")


@pytest.mark.golden
@pytest.mark.parametrize("family", ["internvl", "cohere2_vision"])
def test_grids_of_tiles_are_those_of_transformers(family):
  layout = of_folder(GOLDEN / family).layout
  grid = picture_layouts.read(layout, "layout").grid
  expected = reference(family)
  grids = np.asarray([grid(*size) for size in expected["sizes"].tolist()])
  # A tile alone is the whole picture.
  alone = expected["tiles"].prod(axis=1, keepdims=True) == 1
  np.testing.assert_array_equal(grids, np.where(alone, 0, expected["tiles"]))


@pytest.mark.golden
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_bytes_are_resized_as_by_torch(method):
  expected = reference("cohere2_vision")
  for i in range(6):
    after = expected[f"{method} {i}"]
    before = expected[f"before {i}"]
    resized = torch_resizing.resize(before, after.shape[:2], method)
    np.testing.assert_array_equal(resized, after, err_msg=str(i))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen2_5_vl"])
def test_qwens_read_pictures_alike(kind, tmp_path):
  golden = GOLDEN / "qwen3_vl"
  folder = tmp_path / kind
  shutil.copytree(golden, folder)
  values = json.loads((golden / "config.json").read_text())
  values["model_type"] = kind
  (folder / "config.json").write_text(json.dumps(values))
  tokenizer = tokenizers.get(str(folder))
  ours, theirs = (
    text_pictures.of_folder(str(x), tokenizer, "pictures")
    for x in (folder, golden)
  )
  assert ours == theirs._replace(pp=ours.pp)


def test_a_processor_of_another_family_is_refused(tmp_path):
  folder = tmp_path / "mixed"
  shutil.copytree(GOLDEN / "internvl", folder)
  path = folder / "preprocessor_config.json"
  path.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
  with pytest.raises(ConfigError, match="'CLIPImageProcessor': its pictures"):
    text_pictures.of_folder(
      str(folder), tokenizers.get(str(folder)), "pictures"
    )
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(
    json.dumps(config | {"model_type": "kosmos-2"})
  )
  with pytest.raises(ConfigError, match="'kosmos-2': expected paligemma"):
    text_pictures.of_folder(
      str(folder), tokenizers.get(str(folder)), "pictures"
    )


def test_a_picture_too_narrow_for_a_token_is_refused(tmp_path):
  names = ["0.png", "1.png"]
  thin = [(name, png(np.zeros((3, 200, 3), "u1"))) for name in names]
  path = write(tmp_path, [CHATS["parts"]], thin)
  with pytest.raises(
    DataError, match="line 1.*3x200 pixels: expected at least"
  ):
    source_of("lighton_ocr", path, length=250)


@pytest.mark.golden
def test_a_picture_of_llava_onevision_has_tiles_if_it_is_alone(tmp_path):
  row = dict(CHATS["no places"], images=["0.png"])
  path = write(tmp_path, [row], files_of("llava_onevision"))
  expected = reference("llava_onevision")
  source = source_of("llava_onevision", path, length=120)
  batch = source.read(np.asarray([0]))
  token = json.loads((GOLDEN / "llava_onevision" / "config.json").read_text())[
    "image_token_index"
  ]
  assert (batch["tokens"] == token).sum() == expected["tokens alone"]
  np.testing.assert_array_equal(batch["image"][0], expected["pixels alone"])
  np.testing.assert_array_equal(batch["shapes"][0, 1:], 0)
  # 41 x 30 pixels in 32 x 32.
  np.testing.assert_array_equal(batch["shapes"][0, 0], [2, 2, 8, 6])


@pytest.mark.golden
@pytest.mark.parametrize("prompt", [QUESTION, "<image><image>" + QUESTION])
def test_prompts_are_paligemma_s(prompt, tmp_path):
  row = dict(images=["0.png", "1.png"], prompt=prompt, completion="a seven")
  path = write(tmp_path, [row], files_of("paligemma"))
  expected = reference("paligemma")
  source = source_of("paligemma", path, prefix=True)
  batch = source.read(np.asarray([0]))
  ids = expected["ids"]
  number = len(ids) - 1
  np.testing.assert_array_equal(batch["tokens"][0, :number], ids[:-1])
  end = ids.tolist().index(source._coder.encode("\n")[0]) + 1
  assert batch["prefix"].tolist() == [end]
  has_loss = np.arange(1, len(ids)) >= end
  np.testing.assert_array_equal(batch["loss_mask"][0, :number], has_loss)
  close = dict(rtol=0, atol=1e-6)
  np.testing.assert_allclose(batch["image"][0], expected["pixels"], **close)


def own(tmp_path, rows, length=40, **options):
  """A source for a model of one's own: pictures of 4 x 4, and three tokens."""
  path = write(tmp_path, rows)
  pictures = dict(tokens=3, pp="value_range(0, 1)")
  return supervised.Source("bytes", length, path, pictures=pictures, **options)


def test_pictures_of_packed_rows_stay_with_them(tmp_path):
  values = [[i + 1 for _ in range(i % 3)] for i in range(9)]
  rows = [
    dict(prompt="?" * (i % 4 + 1), completion=f"{i}", images=[])
    for i in range(9)
  ]
  for i, row in enumerate(rows):
    names = [f"{i}.png"] * len(values[i])
    (tmp_path / f"{i}.png").write_bytes(
      png(np.full((4, 4, 3), i + 1, np.uint8))
    )
    row["images"] = names
  source = own(tmp_path, rows, pack=True, prefix=True)
  assert len(source) < 9
  batch = source.read(np.arange(len(source)))
  seen = []
  for b in range(len(source)):
    at = 0
    for segment in range(1, batch["segments"][b].max() + 1):
      there = batch["segments"][b] == segment
      tokens = batch["tokens"][b, there]
      targets = batch["targets"][b, there]
      number = int((tokens == 259).sum()) // 3
      has_loss = batch["loss_mask"][b, there] != 0
      answer = int(source._coder.decode(targets[has_loss]))
      shown = batch["image"][b, at : at + number, 0, 0, 0] * 255
      assert shown.tolist() == pytest.approx(values[answer])
      # The prompt is the prefix.
      prefix = batch["prefix"][b, there]
      assert prefix.sum() == 3 * number + answer % 4 + 1
      assert (np.diff(prefix) <= 0).all()
      at += number
      seen.append(answer)
    assert not batch["image"][b, at:].any()
  assert sorted(seen) == list(range(9))


def row(**changes):
  return dict(prompt="left?", completion="7", images=["0.png"]) | changes


WHOLE = png(np.zeros((4, 4, 3), np.uint8))


@pytest.mark.parametrize(
  ("rows", "content", "message"),
  [
    ([row(), row(images=["no.png"])], WHOLE, "line 2.*no.png: No such file"),
    ([row()], b"hello", "line 1.*0.png: expected a JPEG, PNG"),
    ([row()], WHOLE[:-9], "line 1.*0.png: the file is cut off"),
    (
      [row(prompt="<image> or <image>?")],
      WHOLE,
      "line 1.*1 pictures, but 2 placeholders '<image>'",
    ),
    ([row(images="0.png")], WHOLE, "images: expected a list"),
    (
      [row(images=[[1, 2]])],
      WHOLE,
      "expected paths, bytes of files, or arrays",
    ),
    ([row(images=[])], WHOLE, "no row has any"),
    (
      [row(prompt="x" * 39)],
      WHOLE,
      "43 tokens do not fit into length",
    ),
  ],
)
def test_mistakes_are_refused_with_their_place(
  rows, content, message, tmp_path
):
  (tmp_path / "0.png").write_bytes(content)
  with pytest.raises(DataError, match=message):
    own(tmp_path, rows)


def test_damage_inside_of_a_file_names_the_row(tmp_path):
  noise = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
  damaged = bytearray(png(noise))
  damaged[45:60] = bytes(15)
  (tmp_path / "0.png").write_bytes(WHOLE)
  (tmp_path / "1.png").write_bytes(damaged)
  source = own(tmp_path, [row(), row(images=["1.png"])])
  source.read(np.asarray([0]))
  with pytest.raises(DataError, match=r"rows.jsonl, row 1 .*a picture"):
    source.read(np.asarray([1]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_picture_that_is_cut_off_is_refused(side, tmp_path):
  (tmp_path / "0.png").write_bytes(WHOLE)
  text = {"left": "?", "right": "x" * 38 + "<image>"}[side]
  rows = [row(), row(prompt=text, completion="y" * 45)]
  with pytest.raises(
    DataError, match="row 1 .*cuts off a picture, which leaves"
  ):
    own(tmp_path, rows, too_long=side)
  assert len(own(tmp_path, rows, too_long="drop")) == 1


def test_rows_with_pictures_need_the_option(tmp_path):
  (tmp_path / "0.png").write_bytes(WHOLE)
  path = write(tmp_path, [row()])
  with pytest.raises(DataError, match="line 1.*pictures=FOLDER"):
    supervised.Source("bytes", 40, path)
  with pytest.raises(ConfigError, match="pictures: expected one length"):
    own(tmp_path, [row()], length=(9, 9))
  with pytest.raises(ConfigError, match=r"pictures.tokens.*at least 1"):
    supervised.Source("bytes", 9, path, pictures=dict(tokens=0, pp="copy"))


def test_texts_may_not_spell_image_tokens(tmp_path):
  prompt = "<start_of_image> <image_soft_token>"
  bad = row(prompt=prompt, images=["0.png"])
  path = write(tmp_path, [bad], files_of("gemma3"))
  with pytest.raises(
    DataError, match="prompt spells the special token '<image_"
  ):
    source_of("gemma3", path)


def test_bytes_of_parquet_files(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  values = [{"bytes": WHOLE, "path": None}]
  table = pa.table(
    {"prompt": ["left?"], "completion": ["7"], "images": [values]}
  )
  parquet.write_table(table, tmp_path / "rows.parquet")
  pictures = dict(tokens=3, pp="value_range(0, 1)")
  source = supervised.Source(
    "bytes", 40, str(tmp_path / "rows.parquet"), pictures=pictures
  )
  assert source.read(np.asarray([0]))["image"].shape == (1, 1, 4, 4, 3)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_pictures_of_any_size_in_packed_rows(family, tmp_path):
  """As many image tokens as the pictures of a row need, and these pictures."""
  rng = np.random.default_rng(0)
  sizes = [(20, 9), (31, 44), (8, 8), (16, 33)]
  pictures = [
    (f"{i}.png", png(rng.integers(0, 256, (*size, 3), dtype=np.uint8)))
    for i, size in enumerate(sizes)
  ]
  rows = [
    dict(prompt="?", completion="a", images=[f"{i}.png" for i in numbers])
    for numbers in ([0, 1], [2], [], [3, 2, 0])
  ]
  path = write(tmp_path, rows, pictures)
  packed = source_of(family, path, length=200, pack=True)
  alone = source_of(family, path, length=200)
  by_row = alone.read(np.arange(len(rows)))
  batch = packed.read(np.arange(len(packed)))
  image_token = packed._pictures.token

  def seen(batch, b, picture, tokens):
    """The pictures whose tokens an example has, up to their padding."""
    result = []
    while tokens > 0:
      pixels = batch["image"][b, picture]
      count = 1
      if "shapes" in batch:
        number = int(batch["shapes"][b, picture].prod())
        pixels, count = pixels[:number], number // 4
      result.append(pixels)
      tokens, picture = tokens - count, picture + 1
    assert tokens == 0
    return result, picture

  found = []
  for b in range(len(packed)):
    picture = 0
    for segment in range(1, batch["segments"][b].max() + 1):
      tokens = batch["tokens"][b, batch["segments"][b] == segment]
      number = int((tokens == image_token).sum())
      own, picture = seen(batch, b, picture, number)
      found.append((tokens, own))
  for b in range(len(rows)):
    tokens = np.trim_zeros(by_row["tokens"][b], "b")
    number = int((tokens == image_token).sum())
    own, _ = seen(by_row, b, 0, number)
    (match,) = [
      x
      for x, y in found
      if len(x) == len(tokens)
      and len(y) == len(own)
      and all(np.array_equal(*pair) for pair in zip(y, own))
    ]
    np.testing.assert_array_equal(match, tokens)


def test_the_area_of_pictures_may_be_smaller_than_the_folder_s(tmp_path):
  path = write(tmp_path, [row()], [("0.png", png(np.zeros((90, 90, 3), "u1")))])
  folder = str(GOLDEN / "qwen3_vl")
  pictures = dict(published=folder, min_pixels=64, max_pixels=256)
  source = supervised.Source(folder, 64, path, pictures=pictures)
  assert source.read(np.asarray([0]))["shapes"].tolist() == [[[4, 4]]]
  with pytest.raises(ConfigError, match="max_pixel.*max_pixels"):
    supervised.Source(
      folder, 64, path, pictures=dict(published=folder, max_pixel=256)
    )


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "bmp"])
def test_sizes_of_files_are_those_of_their_pictures(kind):
  import io

  import PIL.Image

  from bigtrain.files import picture_sizes

  file = io.BytesIO()
  PIL.Image.new("RGB", (33, 20)).save(file, kind)
  assert picture_sizes.size(file.getvalue()) == (20, 33)
  with pytest.raises(DataError, match="does not say its size"):
    picture_sizes.size(file.getvalue()[:9])


def test_parts_of_videos_are_refused(tmp_path):
  video = {"type": "video", "path": "a.mp4"}
  row = dict(messages=[{"role": "user", "content": [video, TEXT]}, ANSWER])
  path = write(tmp_path, [row])
  message = (
    r"line 1: messages\[0\]: content\[0\]: video: this source reads texts"
  )
  with pytest.raises(DataError, match=message):
    source_of("gemma4", path)
