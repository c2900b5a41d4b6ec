"""Data sets as tensorflow-datasets prepares them, without its builders."""


def write(data_dir, kind, examples, counts):
  """Writes the data set my_set, version 1.0.0, with a split "train".

  Args:
    data_dir: folder of data sets.
    kind: "tfrecord" or "array_record".
    examples: dicts of image, label and file_name.
    counts: number of examples in each file.
  """
  import tensorflow as tf
  import tensorflow_datasets as lib
  from array_record.python import array_record_module

  features = lib.features.FeaturesDict(
    {
      "image": lib.features.Image(shape=(None, None, 3), encoding_format="png"),
      "label": lib.features.ClassLabel(names=["a", "b", "c"]),
      "file_name": lib.features.Text(),
    }
  )
  folder = data_dir / "my_set" / "1.0.0"
  folder.mkdir(parents=True)
  rest = iter(examples)
  for shard, count in enumerate(counts):
    path = str(folder / f"my_set-train.{kind}-{shard:05d}-of-{len(counts):05d}")
    if kind == "tfrecord":
      writer = tf.io.TFRecordWriter(path)
    else:
      writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for _ in range(count):
      encoded = features.encode_example(next(rest))
      writer.write(features.serialize_example(encoded))
    writer.close()
  lib.folder_dataset.write_metadata(
    data_dir=str(folder),
    features=features,
    split_infos=[
      lib.core.SplitInfo(
        name="train",
        shard_lengths=list(counts),
        num_bytes=0,
        filename_template=lib.core.ShardedFileTemplate(
          dataset_name="my_set",
          data_dir=folder,
          split="train",
          filetype_suffix=kind,
        ),
      )
    ],
    filename_template=lib.core.ShardedFileTemplate(
      dataset_name="my_set", data_dir=folder, filetype_suffix=kind
    ),
    check_data=False,
  )
