"""Rows of other programs: how they are recognised, read and refused."""

import gzip
import json
import logging
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.data.formats import row_shapes
from bigtrain.text import tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
CODER = tokenizers.get(str(GOLDEN))
BYTES = tokenizers.get("bytes")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def turn(speaker, value, **others):
  return {"from": speaker, "value": value, **others}


def message(role, content):
  return {"role": role, "content": content}


SHAREGPT = {
  "conversations": [
    turn("system", "Be brief."),
    turn("human", "Two and two?"),
    turn("gpt", "Four."),
  ]
}
CHAT = [message("user", "Two and two?"), message("assistant", "Four.")]
SYSTEM = message("system", "Be brief.")
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def read(tmp_path, contents, tokenizer="bytes", length=512, **options):
  name = write(tmp_path / "rows.jsonl", contents)
  return supervised.Source(tokenizer, length, name, **options)


def chats(tmp_path, contents, **options):
  return read(tmp_path, contents, str(GOLDEN), template="chatml", **options)


def texts(source, coder=BYTES):
  """[(text up to the end, its part with a loss)] of the examples."""
  batch = source.read(np.arange(len(source)))
  width = batch["targets"].shape[-1]
  result = []
  for tokens, targets, mask in zip(
    *(batch[n].reshape(-1, width) for n in ("tokens", "targets", "loss_mask"))
  ):
    own = np.flatnonzero(mask)
    whole = np.append(tokens[:1], targets[: own[-1] + 1])
    result.append((coder.spell(whole), coder.spell(targets[own])))
  return result


def same(first, second):
  """Whether two sources have the same examples."""
  for name, value in first.read(np.arange(len(first))).items():
    other = second.read(np.arange(len(second)))[name]
    np.testing.assert_array_equal(value, other, err_msg=name)


def plain(row, rows=None, preferences=False, has_template=True):
  reader = row_shapes.Reader(
    rows, preferences=preferences, has_template=has_template
  )
  return reader.read(row).rows


# Conversations.


def test_conversations_of_sharegpt_are_messages(tmp_path, caplog):
  with caplog.at_level(logging.INFO):
    source = chats(tmp_path, [SHAREGPT])
  assert "rows: sharegpt, 3 roles" in caplog.text
  same(source, chats(tmp_path, [{"messages": [SYSTEM, *CHAT]}]))
  same(source, chats(tmp_path, [SHAREGPT], rows="sharegpt"))
  beside = {"conversations": SHAREGPT["conversations"][1:]}
  same(source, chats(tmp_path, [beside | {"system": "Be brief."}]))
  same(source, chats(tmp_path, [SHAREGPT | {"system": "Be brief."}]))
  assert texts(source, CODER)[0][1] == "Four.<|im_end|>\n"


def test_the_log_says_the_shape_again_when_the_tokens_are_kept(
  tmp_path, caplog
):
  chats(tmp_path, [SHAREGPT])
  name = str(tmp_path / "rows.jsonl")
  with caplog.at_level(logging.INFO):
    supervised.Source(str(GOLDEN), 512, name, template="chatml")
  assert "Reading the rows" not in caplog.text
  assert "rows: sharegpt, 3 roles" in caplog.text


@pytest.mark.parametrize(
  "turns, expected",
  [
    # A conversation may begin with the assistant's greeting.
    (
      [turn("gpt", "Hello."), turn("human", "Hi."), turn("gpt", "Yes?")],
      "Hello.<|im_end|>\nYes?<|im_end|>\n",
    ),
    # OpenChat and SlimOrca have weights; an empty system prompt is one.
    (
      [
        turn("system", "", weight=None),
        turn("human", "a", weight=0),
        turn("gpt", "b", weight=0),
        turn("human", "c", weight=0),
        turn("gpt", "d", weight=1),
      ],
      "d<|im_end|>\n",
    ),
    ([turn("user", "a"), turn("chatgpt", "b")], "b<|im_end|>\n"),
    ([message("user", "a"), message("assistant", "b")], "b<|im_end|>\n"),
    ([message("human", "a"), message("gpt", "b")], "b<|im_end|>\n"),
    ([turn("Human", "a"), turn("GPT", "b")], "b<|im_end|>\n"),
    # Windows' ends of lines are part of the text.
    ([turn("human", "a"), turn("gpt", "b\r\nc")], "b\r\nc<|im_end|>\n"),
  ],
)
def test_turns_as_people_have_them(tmp_path, turns, expected):
  source = chats(tmp_path, [{"conversations": turns}])
  same(source, chats(tmp_path, [{"conversation": turns}]))
  assert texts(source, CODER)[0][1] == expected


def test_calls_and_results_of_tools_become_messages():
  call = {"name": "weather", "arguments": {"city": "Bern"}}
  tool = {"name": "weather", "parameters": {}}
  row = {
    "conversations": [
      turn("human", "Weather?"),
      turn("function_call", json.dumps(call)),
      turn("observation", "sunny"),
      turn("gpt", "It is sunny."),
    ],
    "tools": json.dumps([tool]),
    "system": "",
  }
  (result,) = plain(row)
  assert result["tools"] == [{"type": "function", "function": tool}]
  assert result["messages"] == [
    message("user", "Weather?"),
    message("assistant", None)
    | {"tool_calls": [{"type": "function", "function": call}]},
    message("tool", "sunny"),
    message("assistant", "It is sunny."),
  ]
  # Several calls at once.
  row["conversations"][1]["value"] = json.dumps([call, call])
  assert len(plain(row)[0]["messages"][1]["tool_calls"]) == 2


@pytest.mark.parametrize(
  "row, expected",
  [
    (
      {"conversations": [turn("human", "a"), turn("gpt", "")]},
      r"conversations\[1\]: gpt says nothing: value is empty",
    ),
    (
      {"conversations": [turn("human", " "), turn("gpt", "b")]},
      r"conversations\[0\]: human says nothing",
    ),
    (
      {"conversations": [turn("human", "a"), turn("gpt", None)]},
      r"conversations\[1\]: value: expected a text, got null",
    ),
    (
      {"conversations": [turn("human", "a"), turn("gpt", 4)]},
      r"conversations\[1\]: value: expected a text, got 4",
    ),
    (
      {"conversations": [turn("humann", "a"), turn("gpt", "b")]},
      ".*from: unknown 'humann'. Did you mean 'human'",
    ),
    ({"conversations": []}, r"conversations: expected a list .*got \[\]"),
    ({"conversations": "a"}, "conversations: expected a list .*got 'a'"),
    ({"conversations": ["a"]}, r"conversations\[0\]: expected dict\(from"),
    (SHAREGPT | {"system": "Other."}, "system: .*another system prompt"),
    (SHAREGPT | {"system": 3}, "system: expected a text, got 3"),
    (SHAREGPT | {"video": "a.mp4"}, "video: this source reads texts and pic"),
    (SHAREGPT | {"tools": "no json"}, "tools: not valid JSON"),
    (
      {"conversations": [turn("human", "a"), turn("function_call", "f()")]},
      r"conversations\[1\]: function_call is not valid JSON",
    ),
    (
      {"conversations": [turn("human", "a"), turn("function_call", "{}")]},
      ".*function_call: expected JSON with name and arguments, got {}",
    ),
    (
      {"conversations": [turn("human", "a")]},
      "no token has a loss",
    ),
    (
      {"conversations": [turn("human", "\ud83d"), turn("gpt", "b")]},
      r"conversations\[0\].value contains the lone surrogate",
    ),
    (
      {"conversations": [turn("human", "a"), turn("gpt", "b", id=3)]},
      "message 1: id: .*ignore_fields=.'id'",
    ),
  ],
)
def test_conversations_that_cannot_be_read_are_named(tmp_path, row, expected):
  rows = [SHAREGPT, row]
  with pytest.raises(DataError, match=rf"rows.jsonl, line 2: {expected}"):
    chats(tmp_path, rows)


def test_messages_may_have_their_system_prompt_beside_them(tmp_path):
  source = chats(tmp_path, [{"messages": CHAT, "system": "Be brief."}])
  same(source, chats(tmp_path, [{"messages": [SYSTEM, *CHAT]}]))


# Alpaca.

PUBLISHED = (
  "Below is an instruction that describes a task, paired with an input that "
  "provides further context. Write a response that appropriately completes the "
  "request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:"
)
WITHOUT_INPUT = (
  "Below is an instruction that describes a task. Write a response that "
  "appropriately completes the request.\n\n### Instruction:\nSay hello.\n\n"
  "### Response:"
)


def test_alpaca_has_its_published_prompt(tmp_path, caplog):
  rows = [ALPACA]
  for empty in ({"input": ""}, {"input": None}, {"input": " "}, {}):
    rows.append({"instruction": "Say hello.", "output": "Hello."} | empty)
  with caplog.at_level(logging.INFO):
    source = read(tmp_path, rows, bos=False)
  assert "rows: alpaca" in caplog.text
  assert texts(source) == [
    (PUBLISHED + "4<eos>", "4<eos>"),
    *[(WITHOUT_INPUT + "Hello.<eos>", "Hello.<eos>")] * 4,
  ]


def test_alpaca_is_a_chat_where_there_is_a_template(tmp_path, caplog):
  with caplog.at_level(logging.INFO):
    source = chats(tmp_path, [ALPACA])
  assert "rows: alpaca_chat, 2 roles" in caplog.text
  question = message("user", "Add.\n2 and 2")
  answer = message("assistant", "4")
  same(source, chats(tmp_path, [{"messages": [question, answer]}]))
  published = chats(tmp_path, [ALPACA], rows="alpaca")
  assert texts(published, CODER)[0][1].startswith("4")
  assert "### Response:" in texts(published, CODER)[0][0]
  earlier = ALPACA | {"history": [["a", "b"]], "system": "Be brief."}
  messages = [SYSTEM, message("user", "a"), message("assistant", "b")]
  with_history = chats(tmp_path, [earlier])
  expected = [{"messages": [*messages, question, answer]}]
  same(with_history, chats(tmp_path, expected))
  with pytest.raises(DataError, match="system: Alpaca's prompt has no place"):
    chats(tmp_path, [earlier], rows="alpaca")


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({"output": ""}, "output: expected a text, got ''"),
    ({"output": 4}, "output: expected a text, got 4"),
    ({"output": None}, "the row has an instruction and no output"),
    ({"instruction": " "}, "instruction: expected a text, got ''"),
    ({"input": ["2"]}, r"input: expected a text, got \['2'\]"),
    ({"text": "Below is an instruction"}, "rows='alpaca' or rows='text'"),
  ],
)
def test_alpacas_rows_that_cannot_be_read_are_named(
  tmp_path, changes, expected
):
  with pytest.raises(DataError, match=f"rows.jsonl, line 2: .*{expected}"):
    read(tmp_path, [ALPACA, ALPACA | changes])


# Files of OpenAI.


def test_files_of_openai(tmp_path):
  row = {
    "messages": [
      *CHAT,
      message("user", [{"type": "text", "text": "And three?"}]),
      message("assistant", "Seven."),
    ],
    "parallel_tool_calls": False,
  }
  row["messages"][1] = row["messages"][1] | {"weight": 0}
  source = chats(tmp_path, [row])
  ((whole, trained),) = texts(source, CODER)
  assert trained == "Seven.<|im_end|>\n"
  assert "And three?<|im_end|>" in whole and "type" not in whole
  pair = {
    "input": {"messages": CHAT[:1], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [message("assistant", "Four.")],
    "non_preferred_output": [message("assistant", "Five.")],
  }
  explicit = {"prompt": CHAT[:1], "chosen": CHAT[1:]}
  explicit["rejected"] = [message("assistant", "Five.")]
  source = chats(tmp_path, [pair], preferences=True)
  same(source, chats(tmp_path, [explicit], preferences=True))


# Several references.


def test_references_count_as_one_example_together(tmp_path):
  rows = [
    {"prompt": "Capital?", "completion": ["Bern", "Berne", "Bern"]},
    {"prompt": "a", "references": ["b"], "weight": 3},
  ]
  source = read(tmp_path, rows, bos=False)
  assert [trained for _, trained in texts(source)] == [
    *("Bern<eos>", "Berne<eos>", "b<eos>")
  ]
  weights = source.read(np.arange(3))["loss_mask"].max(axis=1)
  assert weights.tolist() == [0.5, 0.5, 3]
  assert "row 0" in source.where(1) and "row 1" in source.where(2)
  with pytest.raises(DataError, match="prompt and completion: expected two"):
    read(tmp_path, [{"prompt": "a", "completion": []}])
  several = ALPACA | {"output": ["4", "four"]}
  assert len(chats(tmp_path, [several])) == len(read(tmp_path, [several])) == 2


# Pairs.

FIVE = message("assistant", "Five.")
ULTRAFEEDBACK = {
  "prompt": "Two and two?",
  "prompt_id": "0",
  "chosen": CHAT,
  "rejected": [CHAT[0], FIVE],
  "messages": CHAT,
  "score_chosen": 8.0,
  "score_rejected": 3.5,
}


@pytest.mark.parametrize(
  "row",
  [
    ULTRAFEEDBACK,
    {"chosen": CHAT, "rejected": [CHAT[0], FIVE]},
    {"prompt": CHAT[:1], "chosen": CHAT, "rejected": [CHAT[0], FIVE]},
    {"prompt": "Two and two?", "chosen": CHAT[1:], "rejected": [FIVE]},
    {"prompt": CHAT[:1], "chosen": "Four.", "rejected": "Five."},
    {"prompt": CHAT[:1], "chosen": CHAT[1], "rejected": FIVE},
    {
      "conversations": [turn("human", "Two and two?")],
      "chosen": turn("gpt", "Four."),
      "rejected": turn("gpt", "Five."),
    },
    {"instruction": "Two and two?", "chosen": "Four.", "rejected": "Five."},
    {"messages": CHAT[:1], "chosen": CHAT[1], "rejected": FIVE},
  ],
)
def test_pairs_of_conversations_are_a_prompt_and_two_answers(tmp_path, row):
  explicit = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [FIVE]}
  expected = chats(tmp_path, [explicit], preferences=True)
  assert [x for _, x in texts(expected, CODER)] == [
    *("Four.<|im_end|>\n", "Five.<|im_end|>\n")
  ]
  same(chats(tmp_path, [row], preferences=True), expected)
  same(chats(tmp_path, [row], rows="preference"), expected)


def test_answers_before_the_last_question_have_no_loss(tmp_path):
  earlier = [message("user", "a"), message("assistant", "b")]
  row = {"chosen": earlier + CHAT, "rejected": [*earlier, CHAT[0], FIVE]}
  source = chats(tmp_path, [row], preferences=True)
  assert texts(source, CODER)[0][1] == "Four.<|im_end|>\n"


@pytest.mark.parametrize(
  "chosen, rejected, prompt",
  [
    # As TRL's extract_prompt has it.
    ("The sky is blue.", "The sky is green.", "The sky is"),
    ("Q: Why?\n\nA:\nSo.", "Q: Why?\n\nA:\nNo.", "Q: Why?\n\nA:\n"),
    # TRL cuts within words here, where tokens would differ from those of texts.
    ("Say: I'm glad", "Say: I've gone", "Say:"),
    ("Say: yes", "Say: yes, sure", "Say:"),
    ("Yes.", "No.", ""),
    ("天空是蓝色的", "天空是绿色的", "天空是"),
  ],
)
def test_the_prompt_of_texts_is_what_they_share(
  tmp_path, chosen, rejected, prompt
):
  row = {"chosen": chosen, "rejected": rejected}
  source = read(tmp_path, [row], preferences=True, bos=True)
  for answer, (whole, trained) in zip((chosen, rejected), texts(source)):
    assert whole == f"<bos>{answer}<eos>"
    assert trained == f"{answer[len(prompt) :]}<eos>"


@pytest.mark.parametrize(
  "row, expected",
  [
    (
      ULTRAFEEDBACK | {"prompt": "Other?"},
      "no question is 'Other\\?'",
    ),
    ({"prompt": "a", "chosen": "b"}, "expected chosen and rejected"),
    (
      {"prompt": "a", "chosen": "b", "rejected": CHAT},
      "expected two texts, or two lists",
    ),
    (
      {"prompt": 3, "chosen": CHAT[1:], "rejected": [FIVE]},
      "prompt: expected a text or messages, got 3",
    ),
    (
      {"chosen": CHAT[1:], "rejected": [FIVE]},
      "chosen and rejected begin with an answer; expected prompt",
    ),
    (
      {"prompt": "a", "chosen": "b", "rejected": "c", "label": True},
      "rows='preference' or rows='unpaired'",
    ),
  ],
)
def test_pairs_that_cannot_be_read_are_named(tmp_path, row, expected):
  with pytest.raises(DataError, match=f"line 2: .*{expected}"):
    chats(tmp_path, [ULTRAFEEDBACK, row], preferences=True)


def test_scores_in_the_wrong_order_are_said(tmp_path, caplog):
  reversed_scores = ULTRAFEEDBACK | {"score_rejected": 9.5}
  rows = [
    ULTRAFEEDBACK,
    reversed_scores,
    ULTRAFEEDBACK | {"score_chosen": None},
  ]
  with caplog.at_level(logging.INFO):
    chats(tmp_path, rows, preferences=True)
  summary = "rows: preference, 2 roles; 1 with a higher score_rejected"
  assert summary in caplog.text


def test_places_of_pairs_are_those_of_the_file(tmp_path):
  rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 5
  source = read(tmp_path, rows, preferences=True)
  assert source.where(3) == f"{tmp_path}/rows.jsonl, row 3 (from 0)"


# Judgements.


@pytest.mark.parametrize(
  "wanted, unwanted",
  [
    (True, False),
    (1, 0),
    (1.0, 0.0),
    ("true", "False"),
    ("1", "0"),
    ("desirable", "undesirable"),
  ],
)
def test_labels_as_people_write_them(wanted, unwanted):
  row = {"prompt": "a", "completion": "b"}
  for label, expected in ((wanted, True), (unwanted, False)):
    result = plain(row | {"label": label}, preferences=True)
    assert result == [row | {"label": expected}]


@pytest.mark.parametrize("label", [None, 2, -1, "good", "", 0.5, [True]])
def test_unclear_labels_are_refused(tmp_path, label):
  rows = [{"prompt": "a", "completion": "b", "label": True}]
  rows.append(rows[0] | {"label": label})
  with pytest.raises(DataError, match="line 2: label: expected true or false"):
    read(tmp_path, rows, preferences=True)


@pytest.mark.parametrize(
  "row",
  [
    {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
    {"prompt": CHAT[:1], "completion": "Four.", "label": True},
    {"messages": CHAT, "label": True},
    {"conversations": SHAREGPT["conversations"][1:], "kto_tag": True},
    {"instruction": "Two and two?", "output": "Four.", "kto_tag": True},
  ],
)
def test_judgements_of_conversations(row):
  (result,) = plain(row, preferences=True)
  expected = {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True}
  assert result == expected


# Recognising.


@pytest.mark.parametrize(
  "row, expected",
  [
    (SHAREGPT | {"messages": CHAT}, "rows='messages' or rows='sharegpt'"),
    (
      {"prompt": "a", "completion": "b", "label": False},
      "rows='prompt_completion' or rows='unpaired'",
    ),
    ({"prompt": "a", "completion": "b", "text": "c"}, "or rows='text'"),
    ({"chosen": "a", "rejected": "b"}, "two answers: expected preferences"),
    ({"conversatoins": []}, "Did you mean 'conversatoins'"),
    ({"question": "a", "answer": "b"}, "expected messages; conversations; "),
    ([1], "expected an object, got list"),
  ],
)
def test_what_could_be_several_shapes_or_none_is_refused(
  tmp_path, row, expected
):
  with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{expected}"):
    read(tmp_path, [row])


def test_a_label_that_is_no_judgement_is_no_second_shape(tmp_path):
  row = {"prompt": "a", "completion": "b", "label": "entailment"}
  assert len(read(tmp_path, [row])) == 1
  assert len(read(tmp_path, [{"text": "a film", "label": 1}])) == 1


def test_the_config_names_the_shape(tmp_path):
  both = {"prompt": "a", "completion": "b", "text": "c"}
  assert texts(read(tmp_path, [both], rows="text", bos=True))[0][1] == "c<eos>"
  source = read(tmp_path, [both], rows="prompt_completion", bos=False)
  assert texts(source)[0][1] == "b<eos>"
  with pytest.raises(ConfigError, match="rows: unknown 'sharegtp'.*'sharegpt'"):
    read(tmp_path, [both], rows="sharegtp")
  with pytest.raises(DataError, match="rows='alpaca': no field 'instruction'"):
    read(tmp_path, [both], rows="alpaca")
  with pytest.raises(ConfigError, match="expected 'preference' or 'unpaired'"):
    read(tmp_path, [both], rows="text", preferences=True)


def test_files_may_mix_shapes_and_the_log_counts_them(tmp_path, caplog):
  rows = [SHAREGPT, {"text": "a"}, SHAREGPT, {"messages": CHAT, "text": None}]
  with caplog.at_level(logging.INFO):
    assert len(chats(tmp_path, rows)) == 4
  summary = "rows: 1 messages, 2 roles; 2 sharegpt, 3 roles; 1 text"
  assert summary in caplog.text


# Files.


def test_files_of_json_and_folders_of_texts(tmp_path, caplog):
  rows = [{"prompt": "a", "completion": "b"}, {"text": "c"}]
  expected = read(tmp_path, rows)
  bom = "\ufeff".encode()
  lines = "\r\n".join(map(json.dumps, rows)).encode()
  array = json.dumps(rows, indent=2).encode()
  for name, content in (
    *(("a.json", array), ("b.json", bom + array), ("c.json", lines)),
    *(("d.json.gz", gzip.compress(array)), ("e.jsonl", bom + lines)),
  ):
    (tmp_path / name).write_bytes(content)
    source = supervised.Source("bytes", 512, str(tmp_path / name))
    same(source, expected)
  assert source.where(1).endswith("e.jsonl, row 1 (from 0)")
  folder = tmp_path / "texts"
  (folder / "more").mkdir(parents=True)
  (folder / "b.txt").write_bytes(bom + b"one\r\ntwo")
  (folder / "more" / "c.TXT").write_text("three")
  (folder / ".hidden.txt").write_text("no")
  (folder / "LICENSE").write_text("no")
  with caplog.at_level(logging.INFO):
    source = supervised.Source("bytes", 512, str(folder), bos=True)
  trained = [text for _, text in texts(source)]
  assert trained == ["one\ntwo<eos>", "three<eos>"]
  assert "left out other files (1), such as LICENSE" in caplog.text
  assert "rows: text" in caplog.text


@pytest.mark.parametrize(
  "name, content, expected",
  [
    ("a.json", "[1]", r"a.json, row 0 \(from 0\): expected an object, got int"),
    ("a.json", '[{"text": "a"}', "a.json: not valid JSON"),
    ("a.json", '{\n"data": []\n}', "a.json: expected an array of objects"),
    ("a.json", '{"data": []}', "line 1: expected messages; .*There are: data"),
    ("a.json", "[]", "a.json: no rows"),
    ("a.txt", " \n", "a.txt: the file has no text"),
    ("a.csv", "a,b", "a.csv: expected a .jsonl, .json, .parquet or .txt file"),
  ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, expected):
  (tmp_path / name).write_text(content)
  with pytest.raises(ConfigError, match=expected):
    supervised.Source("bytes", 512, str(tmp_path / name))


def test_a_folder_has_files_of_one_kind(tmp_path):
  folder = tmp_path / "mixed"
  folder.mkdir()
  with pytest.raises(DataError, match="expected files of one kind.* got none"):
    supervised.Source("bytes", 512, str(folder))
  (folder / "a.txt").write_text("a")
  write(folder / "b.jsonl", [{"text": "b"}])
  with pytest.raises(DataError, match="got 1 .txt, 1 .jsonl; a pattern such"):
    supervised.Source("bytes", 512, str(folder))
  assert len(supervised.Source("bytes", 512, f"{folder}/*")) == 2


# Rows that are left out.


def test_refused_rows_may_be_left_out_and_are_counted(tmp_path, caplog):
  rows = [SHAREGPT, {"conversations": []}, SHAREGPT]
  name = write(tmp_path / "bad.jsonl", rows)
  with open(name, "a") as f:
    f.write('{"conversations": [{"from"')  # The download stopped.
  options = dict(path=name, template="chatml")
  for _ in range(2):  # The second time from the kept tokens.
    caplog.clear()
    source = supervised.Source(str(GOLDEN), 64, skip_errors=2, **options)
    assert len(source) == 2 and "row 2 (from 0)" in source.where(1)
    assert "refused rows are left out (2)" in caplog.text
    assert "bad.jsonl, line 2: conversations" in caplog.text
  for few, end in ((0, "line 2"), (1, "line 4.*more than skip_errors=1 rows")):
    with pytest.raises(DataError, match=f"bad.jsonl, {end}"):
      supervised.Source(str(GOLDEN), 64, skip_errors=few, **options)


def test_refused_rows_are_not_counted_as_a_shape(tmp_path, caplog):
  """Also those that only the template refuses."""
  unknown = {"conversations": [turn("human", "a"), turn("gpt", "b", id=3)]}
  with caplog.at_level(logging.INFO):
    chats(tmp_path, [SHAREGPT, unknown, {"text": "a"}], skip_errors=1)
  assert "rows: 1 sharegpt, 3 roles; 1 text" in caplog.text


def test_a_pair_is_left_out_whole(tmp_path):
  pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
  source = read(
    tmp_path, [pair | {"rejected": 3}, pair], preferences=True, skip_errors=1
  )
  assert len(source) == 1 and "row 1" in source.where(0)
