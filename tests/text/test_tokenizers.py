"""Tokenizers: bytes, SentencePiece models, Hugging Face's tokenizer.json."""

import json
import os
import shutil
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support import small_tokenizers

from bigtrain.config.errors import ConfigError
from bigtrain.pp import parse
from bigtrain.text import tokenizers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """x.model, and hub/tokenizer.json."""
  folder = tmp_path_factory.mktemp("tokenizers")
  small_tokenizers.sentencepiece_model(folder / "x.model")
  (folder / "hub").mkdir()
  small_tokenizers.tokenizer_json(folder / "hub" / "tokenizer.json")
  return folder


@pytest.fixture
def each(folder):
  return {
    "bytes": tokenizers.get("bytes"),
    "sentencepiece": tokenizers.get(str(folder / "x.model")),
    "hugging_face": tokenizers.get(str(folder / "hub")),
  }


KINDS = ("bytes", "sentencepiece", "hugging_face")


def test_bytes():
  tokenizer = tokenizers.get("bytes")
  special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
  assert special_ids == (0, 1, 2)
  assert tokenizer.vocab_size == 259
  ids = tokenizer.encode("aü\0")
  assert ids.dtype == np.int32
  assert ids.tolist() == [97 + 3, 0xC3 + 3, 0xBC + 3, 3]
  assert tokenizer.decode([1, *ids, 2, 0, 0]) == "aü\0"
  # Cut within a character.
  assert tokenizer.decode(ids[:2]) == "a�"


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_inverts_encoding(each, kind):
  tokenizer = each[kind]
  special_ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
  for text in small_tokenizers.TEXTS[:5]:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert 0 <= ids.min() and ids.max() < tokenizer.vocab_size
    assert not tokenizer.special_ids & set(ids.tolist())
    ends = [i for i in special_ids if i]
    # Ids beyond the vocabulary are not text.
    assert tokenizer.decode([*ids, *ends, tokenizer.vocab_size, -1]) == text
  assert tokenizer.encode("").size == 0 and tokenizer.decode([]) == ""


def test_ids_match_the_libraries(folder, each):
  import sentencepiece
  import tokenizers as hugging_face

  text = "a seven left of a three"
  model = sentencepiece.SentencePieceProcessor(str(folder / "x.model"))
  assert each["sentencepiece"].encode(text).tolist() == model.encode(text)
  model = hugging_face.Tokenizer.from_file(str(folder / "hub/tokenizer.json"))
  model.no_truncation()
  model.no_padding()
  assert each["hugging_face"].encode(text).tolist() == model.encode(text).ids


def test_special_tokens(each):
  tokenizer = each["sentencepiece"]
  special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
  assert special_ids == (0, None, 1)
  tokenizer = each["hugging_face"]
  # Only the section on padding has a pad_token: the end of text.
  special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
  assert special_ids == (0, None, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a </s> b", "a<|endoftext|>", "<pad>", "<s>"])
def test_special_tokens_in_a_text_are_plain_text(each, kind, text):
  ids = set(each[kind].encode(text).tolist())
  assert ids and not ids & each[kind].special_ids


@hypothesis.given(st.text())
@hypothesis.settings(max_examples=50)
def test_bytes_encode_any_text(text):
  tokenizer = tokenizers.get("bytes")
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_come_from_the_files_beside_it(tmp_path):
  names = ("<a>", "<b>", "<c>", "</s>")
  small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json", names)
  declared = {
    "pad_token": "<b>",
    "bos_token": None,
    "eos_token": {"content": "<c>", "lstrip": False},
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
  tokenizer = tokenizers.get(str(tmp_path))
  special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
  assert special_ids == (1, None, 2)
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot"):
    small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json", names[:3])
    tokenizers.get(str(tmp_path))


def test_fingerprints_depend_on_the_content(folder, each, tmp_path):
  fingerprints = {tokenizer.fingerprint() for tokenizer in each.values()}
  assert len(fingerprints) == 3
  copy = shutil.copy(folder / "x.model", tmp_path / "y.model")
  assert (
    tokenizers.get(str(copy)).fingerprint()
    == each["sentencepiece"].fingerprint()
  )
  assert tokenizers.get("bytes").fingerprint() == "a25a4717c176ac09"


def test_a_tokenizer_is_cached_until_its_file_changes(tmp_path):
  path = small_tokenizers.sentencepiece_model(tmp_path / "x.model")
  tokenizer = tokenizers.get(path)
  assert tokenizers.get(path) is tokenizer
  small_tokenizers.sentencepiece_model(tmp_path / "x.model", bos_id=3)
  os.utime(path, (1, 1))
  assert tokenizers.get(path).bos_id == 3


def test_errors_name_the_file(folder, tmp_path):
  def refused(spec, match):
    with pytest.raises(ConfigError, match=match) as e:
      tokenizers.get(spec)
    assert "\n" not in str(e.value)

  refused("", "expected 'bytes', the path of a file, or dict.*got ''")
  refused(None, "got None")
  refused("byte", "no such file. Did you mean 'bytes'")
  refused(str(folder / "y.model"), "no such file. Did you mean 'x.model'")
  refused(str(folder / "no" / "x.model"), "there is no folder '.*no'")
  refused(str(tmp_path), "needs one of tokenizer.json, tokenizer.model")
  files = {
    "empty": ("", "the file is empty"),
    "lfs": ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "text": ("hello", "neither a SentencePiece model nor a Hugging Face"),
    "half.json": ('{"model":', "not valid JSON"),
    "list.json": ("[1]", "it has no 'model'"),
    "vocab.json": ('{"a": 0, "b": 1}', "it has no 'model'"),
    "odd.json": ('{"model": {"type": "X"}}', "not a tokenizer.json that tok"),
  }
  for name, (content, match) in files.items():
    (tmp_path / name).write_text(content)
    refused(str(tmp_path / name), match)
  cut = (folder / "x.model").read_bytes()[:300]
  (tmp_path / "cut.model").write_bytes(cut)
  refused(str(tmp_path / "cut.model"), "neither a SentencePiece model")


def test_home_and_relative_paths_are_expanded(folder, monkeypatch):
  monkeypatch.setenv("HOME", str(folder))
  monkeypatch.chdir(folder)
  for path in ("~/x.model", "x.model", "./hub//../x.model"):
    tokenizer = tokenizers.get(path)
    assert tokenizer.name == path
    assert tokenizer.eos_id == 1


@pytest.mark.parametrize(
  "package, file",
  [("sentencepiece", "x.model"), ("tokenizers", "hub/tokenizer.json")],
)
def test_a_missing_package_is_named(
  folder, tmp_path, monkeypatch, package, file
):
  # A path that no test has loaded yet.
  path = shutil.copy(folder / file, tmp_path)
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(
    ConfigError, match=rf"needs {package} .*pip install 'bigtrain\[text\]'"
  ):
    tokenizers.get(str(path))


def test_special_tokens_in_a_text_are_ids_only_on_request(tmp_path):
  special = ("<|endoftext|>", "<|im_end|>")
  path = small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json", special)
  tokenizer = tokenizers.get(path)
  text = "one<|im_end|>two"
  plain, ids = tokenizer.encode(text), tokenizer.encode(text, special=True)
  assert 1 not in plain and ids.tolist().count(1) == 1
  assert tokenizer.decode(plain) == text and tokenizer.decode(ids) == "onetwo"
  assert tokenizer.spell(ids) == text
  assert tokenizer.spellings == {"<|endoftext|>": 0, "<|im_end|>": 1}
  assert not tokenizer.adds_bos
  assert tokenizers.get("bytes").spell([1, 100, 2]) == "<bos>a<eos>"
  with pytest.raises(ConfigError, match="need a tokenizer.json"):
    tokenizers.get("bytes").encode(text, special=True)


# Tokens that a config adds to a tokenizer.json.

NEW = dict(new_tokens=[" quux"], new_special_tokens=["<call>"])


def test_new_tokens_follow_those_of_the_file(tmp_path):
  path = small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json")
  old, new = tokenizers.get(path), tokenizers.get(dict(path=path, **NEW))
  size = old.vocab_size
  assert (new.vocab_size, new.size_in_file) == (size + 2, size)
  assert new.encode("one quux").tolist()[-1] == size
  assert size + 1 not in new.encode("<call>")  # Texts do not spell it.
  assert new.encode("<call>", special=True).tolist() == [size + 1]
  assert new.decode([size, size + 1]) == " quux"
  assert new.spell([size, size + 1]) == " quux<call>"
  assert new.extends(old) and not old.extends(new)
  assert new.fingerprint() != old.fingerprint()
  text = "three left of a seven"
  np.testing.assert_array_equal(old.encode(text), new.encode(text))


def test_a_name_with_new_tokens_is_that_tokenizer(tmp_path):
  path = small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json")
  new = tokenizers.get(dict(path=path, **NEW))
  assert tokenizers.get(new.name) is new
  (tmp_path / "moved").mkdir()
  other = str(tmp_path / "moved" / "tokenizer.json")
  (tmp_path / "tokenizer.json").rename(other)
  moved = tokenizers.get(tokenizers.moved(new.name, other))
  assert moved.fingerprint() == new.fingerprint()


def test_ops_take_new_tokens(tmp_path):
  path = small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json")
  spec = dict(path=path, **NEW)
  (op,) = parse.parse(f"tokenize({spec!r}, max_len=8, eos='none')")
  size = tokenizers.get(path).vocab_size
  assert op.vocab_sizes == {"labels": size + 2}
  ids = op.fn({"text": "a quux"}, np.zeros(0))["labels"]
  assert ids[1] == size
