"""Images with captions through the whole input, from several sources."""

import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from support import small_tokenizers

from bigtrain import main, sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import eval_input, pipeline
from bigtrain.text import tokenizers
from configs import digits_captions

NUM_EXAMPLES = 24
PP = (
  "decode|resize(8)|value_range(-1,1)|choice('{captions}', 'text')|lower"
  "|tokenize({tokenizer!r}, max_len=16, eos='sticky')|keep('image','labels')"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def examples():
  """(image as PNG, captions) of each example."""
  import tensorflow as tf

  result = []
  for i in range(NUM_EXAMPLES):
    image = np.full((9, 12, 3), 10 * i, np.uint8)
    captions = [f"Picture {i}", f"{i}, in Grey", f"third of {i}"]
    # The first 21 examples have two captions, the others three.
    result.append((tf.io.encode_png(image).numpy(), captions[: 2 + (i > 20)]))
  return result


def jsonl(folder, examples):
  rows = []
  for i, (image, captions) in enumerate(examples):
    (folder / f"{i}.png").write_bytes(image)
    rows.append({"file": f"{i}.png", "captions": captions, "id": i})
  path = folder / "x.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return dict(type="jsonl", path=str(path), image_key="file"), "captions"


def parquet(folder, examples):
  rows = [
    {"image": {"bytes": image, "path": f"{i}.png"}, "captions": captions}
    for i, (image, captions) in enumerate(examples)
  ]
  for part in (0, 1):
    table = pa.Table.from_pylist(rows[part::2])
    path = folder / f"train-{part}.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=5)
  pattern = str(folder / "train-*.parquet")
  return dict(type="parquet", path=pattern), "captions"


def tfds(folder, examples):
  import tensorflow as tf
  import tensorflow_datasets as lib

  features = lib.features.FeaturesDict(
    {
      "image": lib.features.Image(shape=(None, None, 3), encoding_format="png"),
      "captions": lib.features.Sequence(
        {"id": np.int64, "text": lib.features.Text()}
      ),
    }
  )
  version = folder / "my_captions" / "1.0.0"
  version.mkdir(parents=True)
  path = str(version / "my_captions-train.tfrecord-00000-of-00001")
  with tf.io.TFRecordWriter(path) as writer:
    for image, captions in examples:
      pixels = tf.io.decode_png(image).numpy()
      nested = [{"id": k, "text": text} for k, text in enumerate(captions)]
      example = {"image": pixels, "captions": nested}
      encoded = features.encode_example(example)
      writer.write(features.serialize_example(encoded))
  template = lib.core.ShardedFileTemplate(
    dataset_name="my_captions",
    data_dir=version,
    split="train",
    filetype_suffix="tfrecord",
  )
  lib.folder_dataset.write_metadata(
    data_dir=str(version),
    features=features,
    split_infos=[
      lib.core.SplitInfo(
        name="train",
        shard_lengths=[len(examples)],
        num_bytes=0,
        filename_template=template,
      )
    ],
    filename_template=template,
    check_data=False,
  )
  return dict(
    type="tfds", name="my_captions", data_dir=str(folder)
  ), "captions/text"


def make_input(data, pp, **options):
  config = settings.Config(
    {"input": {"data": data, "pp": pp, "batch_size": 8, **options}}
  )
  return pipeline.make_train(config.input, seed=0, mesh=sharding.make_mesh())


@pytest.mark.parametrize("kind", [jsonl, parquet, tfds])
def test_batches_have_one_caption_per_image(tmp_path, examples, kind):
  data, key = kind(tmp_path, examples)
  path = small_tokenizers.sentencepiece_model(
    tmp_path / "x.model", byte_fallback=True
  )
  train = make_input(data, PP.format(captions=key, tokenizer=path))
  tokenizer = tokenizers.get(path)
  assert train.vocab_sizes == {"labels": tokenizer.vocab_size}
  assert train.fingerprints[path] == tokenizer.fingerprint()
  assert train.spec["labels"].shape == (8, 16)
  assert train.spec["labels"].dtype == np.int32
  seen = []
  for batch in train.start(0, 6):  # Two epochs.
    for image, labels in zip(
      *map(jax.device_get, (batch["image"], batch["labels"]))
    ):
      number = round(float((image.mean() + 1) * 12.75))
      _, captions = examples[number]
      rows = {}
      for caption in captions:
        ids = tokenizer.encode(caption.lower())[:15].tolist() + [1]
        rows[tuple(ids + [0] * (16 - len(ids)))] = caption
      seen.append((number, rows[tuple(labels.tolist())]))
  numbers = [number for number, _ in seen]
  assert sorted(numbers[:24]) == sorted(numbers[24:]) == list(range(24))
  # The second epoch may draw other captions.
  assert 24 < len(set(seen)) <= 48


def test_batches_can_have_all_captions_of_an_image(tmp_path, examples):
  data, _ = parquet(tmp_path, examples)
  pp = "tokenize(key='captions',max_len=8)|first_rows(3)|keep('labels')"
  data = eval_input.make_eval(
    data=data, pp=pp, batch_size=8, mesh=sharding.make_mesh()
  )
  *_, last = (jax.device_get(batch["labels"]) for batch in data.batches())
  assert last.shape == (8, 3, 8)
  num_captions = (last != 0).any(-1).sum(-1)
  # The second file has the examples with odd numbers.
  counts = [len(examples[i][1]) for i in (*range(0, 24, 2), *range(1, 24, 2))]
  assert num_captions.tolist() == counts[-8:]


def test_bad_captions_are_named_and_can_be_skipped(tmp_path, examples):
  examples = list(examples)
  examples[3] = examples[3][0], ["", " "]
  examples[10] = examples[10][0], []
  data, key = jsonl(tmp_path, examples)
  pp = PP.format(captions=key, tokenizer="bytes")
  with pytest.raises(DataError) as e:
    list(make_input(data, pp, shuffle=False).start(0, 1))
  assert "x.jsonl, line 4: op \"tokenize('bytes'," in str(e.value)
  assert "tokenize cannot use text: " in str(e.value)
  assert "Traceback" not in str(e.value) and "b'" not in str(e.value)
  train = make_input(data, pp, shuffle=False, skip_errors=2)
  batches = [jax.device_get(batch["labels"]) for batch in train.start(0, 3)]
  assert train.skipped == 2 and all((b != 0).any(-1).all() for b in batches)
  with pytest.raises(DataError, match="line 11: op .choice.*too few to choose"):
    list(make_input(data, pp, shuffle=False, skip_errors=1).start(0, 3))


def test_an_image_that_does_not_decode_is_named(tmp_path, examples):
  examples = list(examples)
  examples[5] = b"no picture", ["a"]
  data, key = parquet(tmp_path, examples)
  pp = PP.format(captions=key, tokenizer="bytes")
  with pytest.raises(DataError, match=r"train-1\.parquet, row group 0, row 2"):
    list(make_input(data, pp).start(0, 3))


@pytest.mark.slow
def test_a_run_does_not_resume_with_another_tokenizer(tmp_path):
  file = tmp_path / "x.model"
  config = digits_captions.get_config("runlocal")
  config.evals = {}
  config.mesh = dict(replica=1, fsdp=8)
  config.input.pp = config.input.pp.replace("'bytes'", repr(str(file)))
  config.model.vocab_size = 1000
  config.model.depth = config.model.decoder_depth = 1

  def train(steps, **changes):
    config.update(stop_at_steps=steps, **changes)
    return main.train(config, str(tmp_path / "run"))["step"]

  words = "one two three four five six seven eight nine zero left of an".split()
  small_tokenizers.sentencepiece_model(file, byte_fallback=True)
  assert train(1) == 1
  small_tokenizers.sentencepiece_model(
    file, byte_fallback=True, user_defined_symbols=words
  )
  with pytest.raises(ConfigError, match=r"x\.model: the content has changed"):
    train(2)
  assert train(2, allow_changes=[str(file)]) == 2
