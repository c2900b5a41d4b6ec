"""Tar files in the layout of the library webdataset.

  dict(type="webdataset", path="train-{000..127}.tar")
  dict(
    type="webdataset",
    path="gs://bucket/train-*.tar",
    features={"image": "jpg;png", "label": "cls", "caption": "json/caption"},
  )

The members of a sample are consecutive and have the same name up to the first
dot; the rest of the name, in lower case, is the extension. `.cls`, `.class`,
`.count`, `.index`, `.inx` and `.id` are integers, `.npy` an array, and all
others bytes.
"""

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.data.formats import documents, files, row_files, tar_files

_KNOWN = {
  "image": "jpg;jpeg;png;webp;gif;bmp;tif;tiff;avif",
  "label": "cls",
  "text": "txt",
}
_INTEGERS = ("cls", "class", "count", "index", "inx", "id")
_KEY = "__key__"


class Source(row_files.Rows):
  """The samples of tar files, in their order.

  Each file is scanned once for an index, which is kept until the file changes.

  Args:
    path: a file, a pattern such as "train-{000..127}.tar" or "train-*.tar", or
      a list of these; also URLs of objects in gs:// and s3://.
    features: {feature: extension}. "jpg;png" means the first of these that a
      sample has, "json/caption" a field of the .json, and "__key__" the name of
      the sample. By default all extensions of the first sample and `__key__`;
      pictures are `image`, .cls is `label`, .txt is `text`, and others have the
      names of their extensions.
    slice: slice of the samples, such as "[:99%]".
    index: folder of the indexes, also in an object store; by default the user's
      cache folder.
  """

  def __init__(
    self,
    path: str | Sequence[str],
    *,
    features: Mapping[str, str] | None = None,
    slice: str = "",
    index: str | None = None,
  ):
    if features is not None and not isinstance(features, Mapping):
      example = "{'image': 'jpg;png', 'label': 'cls'}"
      raise ConfigError(
        f"webdataset: features={features!r}: expected a dict such as {example}."
      )
    self._paths = files.find(path, "webdataset: path", remote=True)
    if index is not None:
      index = files.local_path(index, "webdataset: index")
    self._reader = files.Reader()
    packed = files.offsets(self._paths, tar_files.scan_members, index)
    shards = [tar_files.load(each) for each in packed]
    hidden = {
      f"{path}: {name}"
      for path, shard in zip(self._paths, shards)
      for name in shard.hidden
    }
    files.log_hidden(hidden, "webdataset")
    self._keys = [shard.keys for shard in shards]
    counts = [len(keys) for keys in self._keys]
    checksums = [zlib.crc32(each.tobytes()) for each in packed]
    self._open("webdataset", path, counts, checksums, slice)
    first = next(shard for shard in shards if len(shard.keys))
    self._extensions = {x for shard in shards for x in shard.extensions}
    features = _default(first) if features is None else features
    # {feature: (extensions, function of the data, None for bytes)}.
    self._parsers = {name: _parser(x) for name, x in features.items()}
    # {extensions: where their member is in each sample of all files, as
    # (start, size, checksum)}.
    self._members = {
      name: np.concatenate([shard.rows(name.split(";")) for shard in shards])
      for name in dict.fromkeys(name for name, _ in self._parsers.values())
      if name != _KEY
    }
    if not self._members:
      raise ConfigError("webdataset: features: expected an extension.")
    self.spec = self._infer(self._sample(), features, "features")

  def where(self, index: int) -> str:
    ((shard, sample),) = self._places([index])
    key = self._keys[shard][sample].decode("utf-8", "replace")
    return f"{self._paths[shard]}, sample {key!r}"

  def _rows(self, indices: np.ndarray) -> list[dict[str, Any]]:
    at = np.asarray(indices) + self._start
    tables = np.stack([rows[at] for rows in self._members.values()], 1)
    for i, member in np.argwhere(tables[..., 0] < 0):
      name = [*self._members][member]
      hint = did_you_mean(name, self._extensions)
      raise DataError(f"{self.where(indices[i])}: it has no .{name}.{hint}")
    places, rows = self._places(indices), tables.tolist()
    contents = self._reader.read_all(
      [(self._paths[x], tar_files.parts(y)) for (x, _), y in zip(places, rows)]
    )
    result = []
    for i, (content, version) in enumerate(contents):
      shard, sample = places[i]
      if version:
        self._check_stamp(indices[i], shard, version.hex())
      key = self._keys[shard][sample]
      result.append(self._at(indices[i], self._row, content, rows[i], key))
    return result

  def _row(
    self, contents: list[bytes], table: list[list[int]], key: bytes
  ) -> dict[str, Any]:
    members = tar_files.members(contents, table)
    data = {**dict(zip(self._members, members)), _KEY: bytes(key)}
    row: dict[str, Any] = {}
    for name, (member, parse) in self._parsers.items():
      try:
        row[name] = parse(data[member]) if parse else data[member]
      except (ValueError, KeyError) as e:
        problem = f"no field {e}" if type(e) is KeyError else files.one_line(e)
        raise DataError(f".{member}: {problem}.") from e
    return row


def _default(first: tar_files.Index) -> dict[str, str]:
  of_extension = {x: n for n, text in _KNOWN.items() for x in text.split(";")}
  result = {}
  for number in first.members[first.members[:, 0] == 0, 1]:
    extension = first.extensions[number]
    name = of_extension.get(extension, extension)
    result[name] = _KNOWN.get(name, extension)
  return {**result, _KEY: _KEY}


def _parser(extension: str) -> tuple[str, Callable[[bytes], Any] | None]:
  member, _, field = extension.partition("/")
  last = member.rpartition(".")[2]
  if field:
    return member, lambda data: documents.json_object(data)[field]
  if last == "npy":
    return member, lambda data: files.load_array(io.BytesIO(data))
  return member, int if last in _INTEGERS else None
