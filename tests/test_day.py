"""A day with the program, in the words of its documentation.

Folders of pictures: train, report, predict, fine-tune, sweep, export, load
elsewhere. Text files: tokenizer, tokens, train, generate, the
lm-evaluation-harness. Chats: fine-tune a published model, talk to it, export.
The commands are those of the pages; flags only make
models and runs smaller.
"""

import ast
import importlib.util
import json
import pydoc_data.topics
import shutil
import sys

import numpy as np
import pytest
from support import pages, processes

pytestmark = pytest.mark.slow

SMALL = (
  "--config.model.variant=mu/16 --config.input.batch_size=8 "
  "--config.total_epochs=1 --config.evals.val.batch_size=8"
)
DEVICES = 8


def block(page, language, containing):
  """The text of the only block with some words."""
  (text,) = [b.text for b in pages.blocks(page, language) if containing in b[1]]
  return text


def write_pictures(folder, classes):
  """Writes train/ and val/ with a folder of small pictures for each class."""
  import tensorflow as tf

  rng = np.random.default_rng(0)
  for split, number in (("train", 2), ("val", 1)):
    for name in classes:
      path = folder / split / name
      path.mkdir(parents=True)
      for i in range(number):
        image = rng.integers(0, 255, size=(40, 30 + i, 3), dtype=np.uint8)
        jpeg = tf.io.encode_jpeg(image).numpy()
        (path / f"{i}.jpg").write_bytes(jpeg)


def test_a_day_with_pictures(tmp_path):
  shell = lambda text, flags="": pages.ran(
    pages.type_shell(text, tmp_path, flags, DEVICES)
  )
  names = [f"class{i:02}" for i in range(12)]
  write_pictures(tmp_path / "photos", names)
  write_pictures(tmp_path / "birds", ["crow", "owl", "tit"])
  shutil.copy(tmp_path / "birds/val/owl/0.jpg", tmp_path / "photo.jpg")

  # Train.
  config = block("README.md", "python", "def get_config")
  (tmp_path / "my_config.py").write_text(config)
  printed = shell(block("README.md", "", "--config=my_config.py --w"), SMALL)
  assert "Finished at step 3." in printed and "val/acc" in printed
  again = shell(block("README.md", "", "--config=my_config.py --w"), SMALL)
  assert "Finished at step 3." in again

  # Report.
  shell("python -m bigtrain.tools.report runs/mine")
  assert (
    "<html" in (tmp_path / "runs/mine/report/report.html").read_text().lower()
  )

  # Predict: one picture, and a folder.
  lines = block("README.md", "python", "bigtrain.load")
  best = ast.literal_eval(pages.ran(pages.run_python(lines, tmp_path)))
  assert best["label"] in names and len(best["top"]) == 5
  shell(block("docs/predict.md", "", "predict runs/mine photos/"))
  rows = (tmp_path / "labels.jsonl").read_text().splitlines()
  assert len(rows) == 36 and json.loads(rows[0])["label"] in names

  # Fine-tune.
  finetune = block("docs/finetuning.md", "python", "my_config.get_config")
  (tmp_path / "finetune.py").write_text(finetune)
  shell(
    block("docs/finetuning.md", "", "finetune.py"),
    f"{SMALL} --config.total_steps=2 --config.total_epochs=None",
  )
  code = lines.replace("runs/mine", "runs/birds")
  best = ast.literal_eval(pages.ran(pages.run_python(code, tmp_path)))
  assert best["label"] in ("crow", "owl", "tit")

  # Sweep.
  sweep = block("docs/sweeps.md", "", "--grid model.depth=2,4")
  sweep = sweep.replace("digits.py", "digits.py:runlocal")
  shell(sweep.replace("model.depth=2,4", "model.depth=1"))
  table = (tmp_path / "runs/sweep/sweep.csv").read_text()
  assert table.count("finished") == 2

  # Export, and load elsewhere.
  shell(block("docs/predict.md", "", "mine.safetensors"))
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  for name in ("mine.safetensors", "mine.safetensors.json", "photo.jpg"):
    shutil.move(tmp_path / name, elsewhere)
  shutil.move(tmp_path / "runs", tmp_path / "gone")
  code = lines.replace("runs/mine", "mine.safetensors")
  assert ast.literal_eval(pages.ran(pages.run_python(code, elsewhere)))


def test_a_day_with_texts(tmp_path):
  shell = lambda text, flags="": pages.ran(
    pages.type_shell(text, tmp_path, flags)
  )
  page = "docs/tokenizer.md"
  (tmp_path / "texts").mkdir()
  topics = sorted(pydoc_data.topics.topics.items())[:40]
  for name, text in topics:
    (tmp_path / "texts" / f"{name}.txt").write_text(text)
  for name, words in (
    ("train_tokenizer.py", "BpeTrainer"),
    ("my_lm.py", "get_config"),
  ):
    (tmp_path / name).write_text(block(page, "python", words))
  tokenize, train, generate = (
    block(page, "", words)
    for words in ("tools.tokenize", "my_lm.py", "tools.generate")
  )
  shell(block(page, "", "python train_tokenizer.py"))
  shell(tokenize)
  manifest = json.loads((tmp_path / "tokens/manifest.json").read_text())
  assert manifest["num_documents"] == len(topics)
  small = "--config.total_steps=4 --config.model.depth=1"
  assert "val/bits_per_byte" in shell(train, small)
  assert shell(generate).strip()

  if importlib.util.find_spec("lm_eval"):
    (tmp_path / "q.jsonl").write_text(
      json.dumps({"context": "The", "choices": ["with", "x"], "answer": 0})
    )
    (tmp_path / "words.yaml").write_text(
      "task: words\ndataset_path: json\n"
      f"dataset_kwargs: {{data_files: {{test: {tmp_path}/q.jsonl}}}}\n"
      "test_split: test\noutput_type: multiple_choice\n"
      'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\n'
      'doc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]\n'
    )
    table = shell(
      f"{sys.executable} -m bigtrain.tools.lm_eval runs/lm --tasks=words "
      "--include_path=."
    )
    assert "words" in table


def write_published(folder):
  """Writes a small model in the layout of a published one, with a template."""
  (folder / "models").mkdir()
  (config := folder / "tiny.py").write_text(
    "def get_config():\n"
    "  model = dict(variant='llama', vocab_size=400, width=16, depth=1)\n"
    "  return dict(total_steps=1, log_steps=1, task='language_modeling',\n"
    "    input=dict(data=dict(type='text', name='pydoc', length=8),\n"
    "      batch_size=8), model_name='decoder',\n"
    "    model=model | dict(num_heads=2, mlp_dim=24),\n"
    "    optimizer=dict(name='adam'), lr=0.01,\n"
    "    schedule=dict(decay_type='constant'))\n"
  )
  make = f"python -m bigtrain.main --config={config.name} --workdir=tiny"
  pages.ran(pages.type_shell(make, folder))
  export = (
    "python -m bigtrain.tools.checkpoint export tiny models/SmolLM2 --format=hf"
  )
  pages.ran(pages.type_shell(export, folder))
  golden = processes.ROOT / "tests" / "golden" / "chat_masks"
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(golden / name, folder / "models/SmolLM2")
  # As in TRL's file of this format.
  template = json.loads((golden / "qwen3_instruct_2507.json").read_text())
  (folder / "models/SmolLM2/chat_template.jinja").write_text(
    template["template"]
  )


def test_a_day_with_chats(tmp_path):
  page = "docs/finetuning.md"
  shell = lambda text, flags="": pages.ran(
    pages.type_shell(text, tmp_path, flags)
  )
  write_published(tmp_path)
  (tmp_path / "chats.jsonl").write_text(block(page, "text", "messages") * 40)
  (tmp_path / "chats.py").write_text(block(page, "python", "chats.jsonl"))
  train = pages.type_shell(block(page, "", "chats.py"), tmp_path)
  assert "val/perplexity" in pages.ran(train)
  shown = block(page, "text", "[[")
  assert shown in train.stderr
  shell(block(page, "", "tools.generate"), "--max_new=4")
  shell(block(page, "", "export runs/chats"))
  old, new = (tmp_path / "models/SmolLM2", tmp_path / "out")
  assert {f.name for f in old.iterdir()} <= {f.name for f in new.iterdir()}
  for name in ("tokenizer.json", "chat_template.jinja"):
    assert (old / name).read_bytes() == (new / name).read_bytes()
  # Adapters, with an embedding that trains in full.
  lora = block(page, "python", 'train="token_embedding"')
  (tmp_path / "chats_lora.py").write_text(lora)
  shown = shell(block(page, "", "tools.parameters"))
  assert "token_embedding" in shown and "2e-05" in shown
  assert "frozen (base): " in shown
  shell(block(page, "", "config=chats_lora.py --workdir"))
  about = json.loads((tmp_path / "peft/adapter_config.json").read_text())
  assert about["modules_to_save"] == ["embed_tokens"]
  ends = json.loads((new / "generation_config.json").read_text())
  words = json.loads((new / "tokenizer.json").read_text())["added_tokens"]
  (end,) = [w["id"] for w in words if w["content"] == "<|im_end|>"]
  assert ends == {"eos_token_id": [end]}
  # The folder is as good as the one before: train on.
  shutil.rmtree(old)
  shutil.move(new, old)
  shutil.move(tmp_path / "runs", tmp_path / "earlier")
  assert "val/perplexity" in shell(block(page, "", "chats.py"))
