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

    # The index of each tar file: its samples, and where their members are.
    packed = files.offsets(self._paths, tar_files.scan_members, index)
    indexes = [tar_files.load(each) for each in packed]
    self._log_hidden_members(indexes)
    self._keys = [tar.keys for tar in indexes]
    counts = [len(keys) for keys in self._keys]
    checksums = [zlib.crc32(each.tobytes()) for each in packed]
    self._open("webdataset", path, counts, checksums, slice)

    # The extensions to read, and how each becomes a feature.
    self._extensions: set[str] = set()
    for tar in indexes:
      self._extensions.update(tar.extensions)
    if features is None:
      first_with_samples = next(tar for tar in indexes if len(tar.keys))
      features = _default_features(first_with_samples)
    # {feature: (extensions such as "jpg;png", parser or None for bytes)}.
    self._parsers = {name: _parser(text) for name, text in features.items()}
    # {extensions: (start, size, checksum) of their member in each sample of all
    # files, int64 [samples, 3]}. Two features may read the same member.
    self._members: dict[str, np.ndarray] = {}
    for extensions, _ in self._parsers.values():
      if extensions != _KEY and extensions not in self._members:
        rows = [tar.rows(extensions.split(";")) for tar in indexes]
        self._members[extensions] = np.concatenate(rows)
    if not self._members:
      raise ConfigError("webdataset: features: expected an extension.")
    self.spec = self._infer(self._sample(), features, "features")

  def _log_hidden_members(self, indexes: Sequence[tar_files.Index]) -> None:
    hidden = set()
    for path, tar in zip(self._paths, indexes):
      hidden |= {f"{path}: {name}" for name in tar.hidden}
    files.log_hidden(hidden, "webdataset")

  def where(self, index: int) -> str:
    ((shard, sample),) = self._places([index])
    key = self._keys[shard][sample].decode("utf-8", "replace")
    return f"{self._paths[shard]}, sample {key!r}"

  def _rows(self, indices: np.ndarray) -> list[dict[str, Any]]:
    at = np.asarray(indices) + self._start
    # (start, size, checksum) of all members: int64 [B, members, 3].
    tables = np.stack([rows[at] for rows in self._members.values()], 1)
    for i, member in np.argwhere(tables[..., 0] < 0):
      name = [*self._members][member]
      hint = did_you_mean(name, self._extensions)
      raise DataError(f"{self.where(indices[i])}: it has no .{name}.{hint}")

    # All samples are read at once: in an object store, at the same time.
    places = self._places(indices)
    ranges = []
    for (tar, _), table in zip(places, tables.tolist()):
      ranges.append((self._paths[tar], tar_files.parts(table)))
    contents = self._reader.read_all(ranges)

    result = []
    for i, (content, version) in enumerate(contents):
      tar, sample = places[i]
      if version:
        self._check_stamp(indices[i], tar, version.hex())
      key = self._keys[tar][sample]
      table = tables[i].tolist()
      result.append(self._at(indices[i], self._row, content, table, key))
    return result

  def _row(
    self, contents: list[bytes], table: list[list[int]], key: bytes
  ) -> dict[str, Any]:
    """Parses one sample; `table` says where its members are in the tar file."""
    members = tar_files.members(contents, table)
    data = dict(zip(self._members, members))
    data[_KEY] = bytes(key)
    row: dict[str, Any] = {}
    for name, (member, parse) in self._parsers.items():
      try:
        row[name] = parse(data[member]) if parse else data[member]
      except KeyError as e:  # Of the fields in a .json.
        raise DataError(f".{member}: no field {e}.") from e
      except ValueError as e:
        raise DataError(f".{member}: {files.one_line(e)}.") from e
    return row


def _default_features(tar: tar_files.Index) -> dict[str, str]:
  """Features for all extensions of a tar file's first sample, and its key."""
  known = {}
  for name, extensions in _KNOWN.items():
    for extension in extensions.split(";"):
      known[extension] = name, extensions
  result = {}
  is_in_first_sample = tar.members[:, 0] == 0
  for number in tar.members[is_in_first_sample, 1]:
    extension = tar.extensions[number]
    name, extensions = known.get(extension, (extension, extension))
    result[name] = extensions
  return {**result, _KEY: _KEY}


def _parser(text: str) -> tuple[str, Callable[[bytes], Any] | None]:
  """Returns (extensions of the member, its parser or None for bytes).

  Args:
    text: a value of the option `features`, such as "jpg;png" or "json/caption".
  """
  member, _, field = text.partition("/")
  last = member.rpartition(".")[2]

  def json_field(data: bytes) -> Any:
    return documents.json_object(data)[field]

  def array(data: bytes) -> np.ndarray:
    return files.load_array(io.BytesIO(data))

  if field:
    return member, json_field
  if last == "npy":
    return member, array
  return member, int if last in _INTEGERS else None
