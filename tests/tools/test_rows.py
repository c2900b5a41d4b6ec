"""The tool that shows what training makes of files with texts."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from support import browser, pages

from bigtrain.data import supervised
from bigtrain.tools import rows as tool

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
PAGE = "docs/finetuning.md"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)


def chat(question, answer):
  turns = [
    {"from": "human", "value": question},
    {"from": "gpt", "value": answer},
  ]
  return {"conversations": turns}


def write(contents, name="rows.jsonl"):
  pathlib.Path(name).write_text("".join(json.dumps(r) + "\n" for r in contents))
  return name


def survey(contents, **options):
  options = {"template": "chatml"} | options
  return tool.survey(write(contents), str(GOLDEN), **options)


def pair(chosen, rejected):
  return {"prompt": "a", "chosen": chosen, "rejected": rejected}


def source_of(found):
  """The source that the tool advises."""
  settings = eval(tool.config_of(found), {"dict": dict})
  assert settings.pop("type") == "supervised"
  return supervised.Source(**settings)


def test_what_is_found_is_what_is_trained():
  contents = [chat("Hi", "x" * n) for n in (1, 30, 200)]
  contents += [chat("Hi", ""), contents[1], {"text": "abc"}]
  found = survey(contents)
  assert (found.num_rows, found.num_refused) == (5, 1)
  assert found.shapes == "4 sharegpt, 2 roles; 1 text"
  assert "line 4: conversations[1]: gpt says nothing" in found.refused[0]
  (equal,) = found.duplicates
  assert re.fullmatch(
    r"\S+rows.jsonl, line 5 equals \S+rows.jsonl, line 2", equal
  )
  source = source_of(found)
  assert len(source) == 5
  batch = source.read(np.arange(5))
  assert source.spec["tokens"][1] == (found.lengths.max(),)
  ends = [np.flatnonzero(targets)[-1] + 1 for targets in batch["targets"]]
  np.testing.assert_array_equal(found.lengths, ends)
  np.testing.assert_array_equal(found.trained, batch["loss_mask"].sum(axis=1))
  for example, (text, has_loss) in zip(
    found.examples[0].texts[0].pieces, source.first_example()
  ):
    assert example == (text, has_loss)


def test_what_a_length_cuts():
  contents = [chat("Hi", "x" * n) for n in (1, 30, 200)]
  whole = survey(contents)
  assert "A length of 128 cuts 33.3% (1)." in tool.as_text(whole)
  found = survey(contents, length=100)
  cut = dict(tool.facts(found))["Cut"]
  assert "--length=100 is too short for 33.3% (1) of the rows" in cut
  batch = source_of(found).read(np.arange(3))
  lost = int(whole.trained.sum() - batch["loss_mask"].sum())
  assert f"would lose {lost} tokens with a loss" in cut
  assert survey(contents, limit=2).is_limited


def test_pairs_are_recognised_and_their_answers_compared(tmp_path):
  contents = [pair("b", "c"), pair("b", "b"), pair("longer", "c")]
  found = survey(contents)
  assert found.num_rows == 3 and len(found.lengths) == 6
  assert found.equal_answers == [f"{tmp_path}/rows.jsonl, line 2"]
  text = tool.as_text(found)
  assert dict(tool.facts(found))["Answers that are equal"] == "1 pair"
  assert "line 1, chosen: 2 tokens" in text and "a[[b</s>]]" in text
  assert len(source_of(found)) == 3
  # A pair counts once, also if one of its answers is cut.
  cut = dict(tool.facts(survey(contents, length=3)))["Cut"]
  assert "33.3% (1)" in cut


def test_judgements_are_counted():
  row = {"prompt": "a", "completion": "b", "label": True}
  found = survey([row, row | {"label": False}], preferences=True)
  assert "1 wanted, 1 unwanted" in tool.as_text(found)
  assert found.num_duplicates == 0  # The labels differ.
  assert [e.texts[0].name for e in found.examples] == ["wanted", "not wanted"]
  found = survey([row], rows="unpaired")
  assert "nothing of the other kind" in tool.as_text(found)


def test_the_histogram_counts_every_text_once():
  lengths = np.array([0, 1, 2, 3, 3, 5, 6, 7, 100, 127, 128])
  bins = tool.histogram(lengths)
  for (_, high, _), (low, _, _) in zip(bins, bins[1:]):
    assert low == high + 1
  for low, high, count in bins:
    assert count == ((lengths >= low) & (lengths <= high)).sum()
  assert sum(count for _, _, count in bins) == len(lengths)
  assert [low for low, _, _ in bins][-4:] == [48, 64, 96, 128]
  assert tool.histogram(lengths[:0]) == []


def test_variables_reach_the_template():
  pathlib.Path("t.jinja").write_text(
    "{% for m in messages %}{{ x }}{{ m.content }}</s>{% endfor %}"
  )
  found = survey([chat("a", "b")], template="t.jinja", variables={"x": "!"})
  assert found.examples[0].texts[0].pieces == [
    ("!a</s>", False),
    ("!b</s>", True),
  ]
  assert len(source_of(found)) == 1


def test_long_examples_are_shortened_and_text_is_escaped():
  found = survey([chat("<b>Hi</b>", "x" * 5000)])
  assert "more tokens" in tool.as_text(found)
  html = tool.as_page(found)
  assert "&lt;b&gt;Hi" in html and "<b>" not in html
  assert len(html) < 20_000 and "more tokens" in html


@pytest.mark.parametrize(
  "arguments, code, message",
  [
    (["--tokenizer=bytes"], 2, "rows.jsonl, line 1: prompt, "),
    (["--tokenizer=bytes", "--rows=sharegtp"], 2, "Did you mean 'sharegpt'"),
    (["--tokenizer=bytes", "--length=0"], 2, "--length: expected a whole"),
    ([], 2, "--tokenizer"),
    (["--tokenizer=bytes", "--variables=x"], 2, "--variables: not valid JSON"),
  ],
)
def test_mistakes_are_one_line(capsys, arguments, code, message):
  write([{"prompt": "a", "completion": "b", "label": True}])
  try:
    ended = tool.main(["rows.jsonl", *arguments])
  except SystemExit as e:
    ended = e.code
  assert ended == code and message in capsys.readouterr().err


def test_the_command_of_the_page(tmp_path):
  """The page opens in a browser without an error."""
  shutil.copytree(GOLDEN, tmp_path / "models" / "SmolLM2")
  template = json.loads((GOLDEN / "qwen3_instruct_2507.json").read_text())
  (tmp_path / "models/SmolLM2/chat_template.jinja").write_text(
    template["template"]
  )
  (line,) = [b.text for b in pages.blocks(PAGE, "text") if "messages" in b.text]
  (tmp_path / "chats.jsonl").write_text(line * 3)
  (command,) = [b for b in pages.blocks(PAGE, "") if "tools.rows" in b.text]
  printed = pages.ran(pages.type_shell(command.text, tmp_path))
  assert "messages, 2 roles" in printed and "chats.html" in printed
  said = browser.play(
    tmp_path / "chats.html",
    "say(all('mark').length, all('.bars span').length);"
    "say(all('mark')[0].innerText.trim());"
    "say(document.body.scrollWidth <= innerWidth);",
  )
  assert said == ["3 1", "A program that trains models.<|im_end|>", "true"]


def test_rows_with_pictures():
  folder = str(GOLDEN.parent / "picture_processors" / "llava")
  rows = []
  for i in (0, 1, 0):
    # Its first and last bytes; the tool decodes no pictures.
    png = b"\x89PNG\r\n\x1a\n" + bytes([i]) + b"IEND\xaeB`\x82"
    pathlib.Path(f"{i}.png").write_bytes(png)
    content = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    question = {"role": "user", "content": content}
    answer = {"role": "assistant", "content": "a seven"}
    rows.append({"messages": [question, answer], "images": [f"{i}.png"]})
  found = tool.survey(write(rows), folder, pictures=folder)
  assert found.num_rows == 3, found.refused
  assert found.num_duplicates == 1  # Texts are equal, pictures are not.
  found = tool.survey("rows.jsonl", folder)
  assert "line 1: the row has pictures; pictures=" in found.refused[0]
