"""Makes files of data sets with the libraries that define them.

  python tests/golden/make_data_files.py

Needs datasets==5.2.0, webdataset==1.0.2 and pillow. Writes webdataset/odd.tar
and samples.json, its samples by webdataset; and datasets/, saved with
`save_to_disk` and from the cache of `load_dataset`.
"""

import glob
import io
import json
import pathlib
import shutil
import tarfile
import tempfile

FOLDER = pathlib.Path(__file__).parent
NAMES = """
  a.jpg a.cls ./b.jpg ./b.CLS c.left.jpg c.right.jpg folder.x/d.jpg
  folder.x/d.cls folder.y/d.jpg ._e.jpg .hidden f __meta__.json g..txt h.
  i.tar.gz j.jpg k.jpg j.txt
"""


def odd_names(folder):
  """Writes a tar file whose members contain their names."""
  import webdataset

  folder.mkdir(exist_ok=True)
  with tarfile.open(folder / "odd.tar", "w") as tar:
    for name in NAMES.split():
      info = tarfile.TarInfo(name)
      info.size = len(name)
      tar.addfile(info, io.BytesIO(name.encode()))
  samples = []
  for sample in webdataset.WebDataset(
    str(folder / "odd.tar"), shardshuffle=False
  ):
    values = {k: v.decode() for k, v in sample.items() if k[:1] != "_"}
    samples.append([sample["__key__"], values])
  (folder / "samples.json").write_text(json.dumps(samples, indent=1) + "\n")


def rows():
  """Returns rows with a picture, a class and captions."""
  import PIL.Image

  result = []
  for i in range(7):
    content = io.BytesIO()
    PIL.Image.new("RGB", (4 + i, 3), (i * 20, 0, 0)).save(content, "PNG")
    image = {"bytes": content.getvalue(), "path": f"{i}.png"}
    captions = [f"c{i}"] * (i % 3)
    row = dict(image=image, label=i % 2, captions=captions, score=i / 2)
    result.append(row)
  return result


def saved(folder):
  """Writes saved/ with splits of five and two rows, and cached/ with all."""
  import datasets

  features = datasets.Features(
    image=datasets.Image(),
    label=datasets.ClassLabel(names=["cat", "dog"]),
    captions=datasets.Sequence(datasets.Value("string")),
    score=datasets.Value("float64"),
  )
  whole = datasets.Dataset.from_list(rows(), features=features)
  splits = {"train": whole.select(range(5)), "test": whole.select([6, 5])}
  shutil.rmtree(folder, ignore_errors=True)
  shards = {"train": 2, "test": 1}
  datasets.DatasetDict(splits).save_to_disk(folder / "saved", num_shards=shards)
  with tempfile.TemporaryDirectory() as cache:
    whole.to_parquet(f"{cache}/x.parquet")
    files = {"train": f"{cache}/x.parquet"}
    datasets.load_dataset("parquet", data_files=files, cache_dir=cache)
    (info,) = glob.glob(f"{cache}/parquet/*/*/*/dataset_info.json")
    shutil.copytree(pathlib.Path(info).parent, folder / "cached")


if __name__ == "__main__":
  odd_names(FOLDER / "webdataset")
  saved(FOLDER / "datasets")
