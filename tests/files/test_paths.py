"""Paths as users type them, and the files of a run in a folder."""

import os
import pathlib

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.files import paths


@pytest.fixture
def here(tmp_path, monkeypatch):
  """The working directory, with a link to ../there/deep; HOME is ../home."""
  for name in ("here", "home", "there/deep"):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / "here" / "link").symlink_to(tmp_path / "there" / "deep")
  monkeypatch.chdir(tmp_path / "here")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  return tmp_path / "here"


@pytest.mark.parametrize(
  "typed, expected",
  [
    ("run", "here/run"),
    ("./run", "here/run"),
    ("run/", "here/run"),
    ("run/.", "here/run"),
    ("../here/./run", "here/run"),
    ("a//b///c", "here/a/b/c"),
    ("missing/../run", "here/run"),
    ("two words/a run", "here/two words/a run"),
    ("~/run", "home/run"),
    ("~", "home"),
    ("a~/~", "here/a~/~"),
    ("link", "here/link"),
    ("link/run", "here/link/run"),
    ("link/../run", "there/run"),
    (".", "here"),
    ("", "here"),
  ],
)
def test_absolute(here, typed, expected):
  root = here.parent
  assert paths.absolute(typed) == str(root / expected)
  assert paths.absolute(pathlib.Path(typed)) == str(root / expected)
  assert paths.absolute(paths.absolute(typed)) == paths.absolute(typed)
  # What the operating system opens under the typed name.
  if not typed.startswith(("~", "missing")) and typed:
    assert os.path.realpath(paths.absolute(typed)) == os.path.realpath(typed)


def test_absolute_paths_stay_and_need_no_working_directory(
  tmp_path, monkeypatch
):
  (tmp_path / "gone").mkdir()
  monkeypatch.chdir(tmp_path / "gone")
  (tmp_path / "gone").rmdir()
  assert paths.absolute("/a/b") == "/a/b"
  assert paths.absolute("//a/../../b/") == "/b"
  assert paths.absolute("/") == "/"
  with pytest.raises(FileNotFoundError):
    paths.absolute("a")


def test_urls_of_object_stores_keep_their_parts():
  assert paths.absolute("gs://bucket/run/") == "gs://bucket/run"
  assert paths.absolute("s3://bucket/") == "s3://bucket"
  assert paths.absolute("gs://bucket/~/two words") == "gs://bucket/~/two words"
  with pytest.raises(ConfigError, match="'s4'; expected a folder, gs://"):
    paths.absolute("s4://bucket/run")


def test_an_error_of_a_file_has_its_name_and_not_a_temporary_one(tmp_path):
  path = str(tmp_path / "gone" / "x.json")
  with pytest.raises(FileNotFoundError) as e, paths.replacing(path):
    pass
  assert e.value.filename == path
