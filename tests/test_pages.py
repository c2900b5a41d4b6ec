"""Pages of docs that lead through a task: their commands run as printed."""

import json
import re

import numpy as np
import pytest
import tiny
from support import pages, published_models

from bigtrain import main
from bigtrain.text import tokenizers


def test_the_parts_in_the_readme(tmp_path, monkeypatch):
  names = ("my_task", "my_model", "my_evaluator", "my_source")
  texts = [b.text for b in pages.blocks("README.md", "python")]
  defining = ("def loss_fn", "class Model", "class Evaluator", "class Source")
  folder = tmp_path / "readme_project"
  folder.mkdir()
  for name, line in zip(names, defining):
    (text,) = [t for t in texts if line in t]
    (folder / f"{name}.py").write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  np.save("x.npy", np.random.default_rng(0).random((64, 10), np.float32))
  project = "readme_project"
  data = dict(
    data=dict(type=f"{project}.my_source", path="x.npy"),
    pp="copy('image','target')|keep('image','target')",
  )
  config = dict(
    total_steps=30,
    task=f"{project}.my_task",
    model_name=f"{project}.my_model",
    model=dict(width=16),
    input=dict(**data, batch_size=16),
    optimizer=dict(name="adam"),
    lr=0.01,
    tensorboard=False,
    evals=dict(
      own=dict(
        type=f"{project}.my_evaluator", pred="out", **data, at_start=True
      )
    ),
  )
  results = main.train(config, "run")
  assert np.isfinite(results["own/largest"])
  rows = tiny.rows(tmp_path / "run")
  assert rows[30]["loss"] < 0.5 * rows[1]["loss"]


@pytest.mark.slow
def test_out_of_memory(tmp_path):
  plan, train = pages.blocks("docs/out_of_memory.md", "")
  table = pages.ran(pages.type_shell(plan.text, tmp_path))
  assert re.search(r"^devices +1$", table, re.M)
  assert re.search(r"of 80 +\d.*%", table)
  ended = pages.type_shell(train.text, tmp_path)
  assert ended.returncode == 1
  line = ended.stderr.strip().splitlines()[-1]
  (printed,) = pages.blocks("docs/out_of_memory.md", "text")
  without_figures = lambda text: re.sub(
    r"=\d+ |[\d.]+ [kMG]?B", "", " ".join(text.split())
  )
  assert without_figures(line) == without_figures(printed.text)


@pytest.mark.slow
def test_debugging_a_nan(tmp_path):
  ended = [
    pages.type_shell(block.text, tmp_path)
    for block in pages.blocks("docs/debug_nan.md", "")
  ]
  assert [e.returncode for e in ended] == [1, 1, 1]
  first, second, third = (e.stderr.strip().splitlines()[-1] for e in ended)
  (printed,) = pages.blocks("docs/debug_nan.md", "text")
  words = " ".join(printed.text.split())
  for part in words.split(" ... ")[1:] + words.split("; examples")[:1]:
    assert part in first
  assert "step 3 is not finite" in second
  assert third.startswith("error: FloatingPointError: invalid value (nan)")
  assert re.search(r'File ".*/bigtrain/.*\.py"', ended[2].stderr)
  # The second command has resumed from the checkpoint of step 2.
  assert "resumed from step 2" in ended[1].stderr


@pytest.mark.slow
def test_profiling(tmp_path):
  train, touch = pages.blocks("docs/profiling.md", "")
  pages.ran(pages.type_shell(train.text, tmp_path))
  assert list((tmp_path / "runs/slow/profile").rglob("*.xplane.pb"))
  pages.ran(pages.type_shell(touch.text, tmp_path))


@pytest.mark.slow
def test_adding_tokens(tmp_path):
  """docs/finetuning.md; the published model is a small random one."""
  template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
  template += "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
  template += "<|im_start|>assistant\n{% endif %}"
  (tmp_path / "models").mkdir()
  folder = tmp_path / "models" / "SmolLM2"
  ends = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
  size = published_models.write(folder, special=ends, depth=1, max_len=1024)
  (folder / "chat_template.jinja").write_text(template)
  chat = [
    dict(role="user", content="one left of a bigtrain?"),
    dict(role="assistant", content="six <call>seven</call>"),
  ]
  rows = json.dumps(dict(messages=chat)) + "\n"
  (tmp_path / "chats.jsonl").write_text(900 * rows)
  page = "docs/finetuning.md"
  for name, line in (("chats", "total_epochs=2"), ("tokens", "import chats")):
    texts = [x.text for x in pages.blocks(page, "python") if line in x.text]
    (tmp_path / f"{name}.py").write_text(texts[0])
  (block,) = [x for x in pages.blocks(page, "") if "runs/tokens" in x.text]
  pages.ran(pages.type_shell(block.text, tmp_path))
  config = json.loads((tmp_path / "out" / "config.json").read_text())
  assert config["vocab_size"] == -(-(size + 3) // 64) * 64
  tokenizer = tokenizers.get(str(tmp_path / "out"))
  ids = tokenizer.encode("a bigtrain</call>", special=True).tolist()
  assert ids[-2:] == [size, size + 2]
