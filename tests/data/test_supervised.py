"""Supervised texts: rows, their targets, packing, cuts, what is refused."""

import gzip
import json
import pathlib
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.data.formats import packing, row_encoder
from bigtrain.inference import saved
from bigtrain.text import tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
CODER = tokenizers.get(str(GOLDEN))
BYTES = tokenizers.get("bytes")
CHAT = [
  {"role": "user", "content": "Hello"},
  {"role": "assistant", "content": "Hi."},
]
PAIRS = [
  {"prompt": f"{i}+1=", "completion": "x" * (i % 7 + 1)} for i in range(40)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "bigtrain" / "rows"


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def make(path, rows, tokenizer="bytes", length=64, **options):
  name = write(path / "rows.jsonl", rows)
  return supervised.Source(tokenizer, length, name, **options)


def chats(path, rows, **options):
  options = {"template": "chatml", **options}
  return make(path, rows, str(GOLDEN), **options)


def everything(source):
  return source.read(np.arange(len(source)))


def texts(source, coder=BYTES):
  """[(context, targets with a loss)] of each row, from unpacked examples."""
  result = []
  batch = everything(source)
  for tokens, targets, mask in zip(
    batch["tokens"], batch["targets"], batch["loss_mask"]
  ):
    at = np.flatnonzero(mask)
    context = coder.spell(tokens[: at[0] + 1])
    result.append((context, coder.spell(targets[at])))
  return result


def test_a_completion_has_a_loss_and_its_prompt_does_not(tmp_path):
  source = make(tmp_path, PAIRS)
  assert texts(source)[:3] == [
    ("0+1=", "x<eos>"),
    ("1+1=", "xx<eos>"),
    ("2+1=", "xxx<eos>"),
  ]
  batch = everything(source)
  following = batch["tokens"][:, 1:]
  real = following != 0
  assert (batch["targets"][:, :-1][real] == following[real]).all()
  assert source.where(3) == f"{tmp_path}/rows.jsonl, row 3 (from 0)"
  assert source.vocab_sizes == {"tokens": 259, "targets": 259}
  with_bos = make(tmp_path, PAIRS, bos=True)
  assert texts(with_bos)[0] == ("<bos>0+1=", "x<eos>")
  assert with_bos.fingerprint() != source.fingerprint()


def test_every_token_of_two_texts_has_a_loss_if_asked_for(tmp_path):
  source = make(tmp_path, PAIRS[:1], loss="all")
  assert texts(source) == [("0", "+1=x<eos>")]


def test_plain_text_is_trained_as_a_whole(tmp_path):
  assert texts(make(tmp_path, [{"text": "abc"}])) == [("a", "bc<eos>")]
  source = make(tmp_path, [{"text": "abc"}], bos=True)
  assert texts(source) == [("<bos>", "abc<eos>")]


def test_rows_of_messages(tmp_path):
  tools = [{"type": "function", "function": {"name": "f"}}]
  question = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
  rows = [
    {"messages": CHAT},
    {"prompt": CHAT * 2 + CHAT[:1], "completion": CHAT[1:]},
  ]
  source = chats(tmp_path, rows, length=99)
  end = "Hi.<|im_end|>\n"
  assert texts(source, CODER) == [
    (question, end),
    (2 * (question + end) + question, end),
  ]
  template = tmp_path / "t.jinja"
  template.write_text(
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{{ x }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
  )
  rows = [{"messages": CHAT, "tools": x} for x in (tools, json.dumps(tools))]
  source = chats(
    tmp_path, rows, template=str(template), variables=dict(x="!"), length=99
  )
  context = f"{json.dumps(tools)}<|user|>Hello!</s><|assistant|>"
  assert texts(source, CODER) == [(context, "Hi.!</s>")] * 2


def test_weights_of_rows(tmp_path):
  batch = everything(
    make(tmp_path, [{**PAIRS[0], "weight": w} for w in (2, 0.5)])
  )
  assert sorted(set(batch["loss_mask"].ravel())) == [0, 0.5, 2]
  batch = everything(make(tmp_path, [{**PAIRS[0], "weight": None}]))
  assert set(batch["loss_mask"].ravel()) == {0, 1}
  with pytest.raises(DataError, match="line 1: weight: expected a number"):
    make(tmp_path, [{**PAIRS[0], "weight": "2"}])


def test_encoder_decoders_get_inputs_and_targets(tmp_path):
  source = make(tmp_path, PAIRS, length=(8, 12))
  batch = everything(source)
  assert BYTES.spell(batch["inputs"][20]).startswith("20+1=<eos><pad>")
  assert BYTES.spell(batch["targets"][20]).startswith("xxxxxxx<eos><pad>")
  np.testing.assert_array_equal(batch["loss_mask"], batch["targets"] != 0)
  assert source.vocab_sizes == {"inputs": 259, "targets": 259}
  rows = [{"messages": CHAT * 2}]
  source = chats(tmp_path, rows, length=(64, 8))
  batch = everything(source)
  assert CODER.spell(batch["inputs"][0]).count("Hi.") == 1
  assert CODER.spell(batch["targets"][0]).startswith("Hi.<|im_end|>\n<s>")
  assert batch["loss_mask"][0].sum() == CODER.encode("Hi.\n").size + 1
  with pytest.raises(ConfigError, match="only targets have a loss"):
    chats(tmp_path, rows, length=(64, 8), loss="all")


def documents(batch, names, segments):
  """{tuple of the ids of each row: its mask} of packed examples."""
  result = []
  for b in range(len(batch[names[0]])):
    for number in range(1, int(batch[segments[0]][b].max()) + 1):
      parts = []
      for name, own in zip(names, segments):
        parts.append(tuple(batch[name][b][batch[own][b] == number].tolist()))
      mask = batch["loss_mask"][b][batch[segments[-1]][b] == number]
      result.append((*parts, tuple(mask.tolist())))
  return sorted(result)


def test_packed_examples_hold_every_row_once(tmp_path):
  apart = make(tmp_path, PAIRS, length=30)
  packed = make(tmp_path, PAIRS, length=30, pack=True)
  assert len(packed) < len(apart) / 2
  batch = everything(apart)
  rows = []
  for tokens, targets, mask in zip(
    batch["tokens"], batch["targets"], batch["loss_mask"]
  ):
    real = targets != 0
    rows.append(tuple(tuple(x[real].tolist()) for x in (tokens, targets, mask)))
  batch = everything(packed)
  names, own = ("tokens", "targets"), ("segments", "segments")
  assert documents(batch, names, own) == sorted(rows)
  for segments, positions in zip(batch["segments"], batch["positions"]):
    starts = np.flatnonzero(np.diff(segments, prepend=0))
    assert (positions[starts] == 0).all()
    moves = np.diff(positions)[np.diff(segments) == 0]
    assert set(moves[moves != 0]) == {1}
  assert not batch["loss_mask"][batch["segments"] == 0].any()


def test_packed_pairs_hold_every_row_once(tmp_path):
  apart = make(tmp_path, PAIRS, length=(20, 24))
  packed = make(tmp_path, PAIRS, length=(20, 24), pack=True)
  assert len(packed) < len(apart) / 2
  batch = everything(apart)
  rows = [
    (
      tuple(i[i != 0].tolist()),
      tuple(t[t != 0].tolist()),
      (1.0,) * int(m.sum()),
    )
    for i, t, m in zip(batch["inputs"], batch["targets"], batch["loss_mask"])
  ]
  own = ("inputs_segments", "targets_segments")
  found = documents(everything(packed), ("inputs", "targets"), own)
  assert found == sorted(rows)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
  st.integers(1, 3).flatmap(
    lambda k: st.tuples(
      st.lists(st.integers(5, 20), min_size=k, max_size=k),
      st.lists(st.lists(st.integers(0, 5), min_size=k, max_size=k), min_size=1),
    )
  )
)
def test_best_fit_fills_bins(case):
  capacity, rows = case
  sizes = np.asarray(rows)
  items, first = packing.best_fit(sizes, capacity)
  assert sorted(items) == [*range(len(rows))]
  loads = np.add.reduceat(sizes[items], first[:-1], axis=0)
  assert (np.diff(first) > 0).all() and (loads <= capacity).all()
  for a, b in zip(first[:-1], first[1:]):
    assert (np.diff(items[a:b]) > 0).all()
  if len(capacity) == 1:
    # By definition: longest first, each into the fullest bin with room.
    bins = []
    for size in sorted(sizes[:, 0].tolist(), reverse=True):
      fitting = [b for b in bins if sum(b) + size <= capacity[0]]
      if fitting:
        max(fitting, key=sum).append(size)
      else:
        bins.append([size])
    assert sorted(loads[:, 0]) == sorted(map(sum, bins))


def test_what_is_too_long_is_an_error_or_a_choice_with_a_count(
  tmp_path, caplog
):
  rows = [*PAIRS[:2], {"prompt": "abcdef", "completion": "uvwxyz"}]
  rows += [{"prompt": "a" * 20, "completion": "z"}]
  message = "row 2 .* 12 tokens do not fit into length=.10.*2 of 4 rows"
  with pytest.raises(DataError, match=message):
    make(tmp_path, rows, length=10)
  left = texts(make(tmp_path, rows, length=10, too_long="left"))
  assert left[2:] == [("cdef", "uvwxyz<eos>"), ("a" * 9, "z<eos>")]
  assert (
    "2 of 4 rows" in caplog.text and "2 are cut at the left, 0" in caplog.text
  )
  right = texts(make(tmp_path, rows, length=10, too_long="right"))
  assert right[2:] == [("abcdef", "uvwxy")]
  assert "1 are cut at the right, 1 left out" in caplog.text
  assert len(make(tmp_path, rows, length=10, too_long="drop")) == 2
  assert "length=[10]: 2 left out" in caplog.text
  source = make(tmp_path, rows, length=(7, 3), too_long="right")
  assert BYTES.spell(everything(source)["targets"][2]) == "uvw"
  with pytest.raises(ConfigError, match="too_long: unknown 'cut'"):
    make(tmp_path, rows, too_long="cut")


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"prompt": "a", "completion": ""}, None),
    ({"messages": CHAT[:1]}, "line 2: no token has a loss: .*Hello"),
    ({"messages": CHAT, "tools": "no json"}, "line 2: .*char 0"),
    ({"text": "\ud800"}, "line 2: text contains the lone surrogate"),
    ({"messages": []}, "line 2: messages: expected a list"),
    ({"messages": [{"rol": "user"}]}, "line 2: message 0: expected dict.role="),
    ({"prompt": "a"}, "line 2: prompt and completion: expected two texts"),
    ({"mesages": CHAT}, "line 2: expected messages.* Did you mean 'mesages'"),
    ({"text": 3}, "line 2: text: expected a string, got int"),
    (
      {"messages": [CHAT[0], {**CHAT[1], "content": "a<|im_end|>"}]},
      "line 2: message 1: .*special token '<.im_end.>'",
    ),
    (
      {"messages": CHAT, "tools": [{"name": "f"}]},
      "line 2: chat template 'chatml': .*no tools",
    ),
  ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_line(
  row, message, tmp_path
):
  rows = [{"messages": CHAT}, row]
  if message is None:
    chats(tmp_path, rows)  # An end is a target.
    return
  with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
    chats(tmp_path, rows)


CALL = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}


@pytest.mark.parametrize(
  ("conversation", "expected"),
  [
    (
      [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}],
      "message 1: tool_calls: .*'chatml' does not write",
    ),
    ([{**CHAT[0], "content": 5}, CHAT[1]], "message 0: content: .* got 5"),
    (
      [CHAT[0], {**CHAT[1], "reasoning_content": "First this."}],
      "message 1: reasoning_content: .*ignore_fields=.'reasoning_content'",
    ),
    ([CHAT[0], {**CHAT[1], "name": "Ann"}], "message 1: name: "),
    (
      [
        {**CHAT[0], "content": [{"type": "text", "text": "Say hello."}]},
        {**CHAT[1], "content": [{"type": "text", "text": "Hello."}]},
      ],
      ["Hello.<|im_end|>\n"],
    ),
    (
      [CHAT[0], {**CHAT[1], "content": "one"}, {**CHAT[1], "content": "two"}],
      ["one<|im_end|>\n", "two<|im_end|>\n"],
    ),
    (
      [
        CHAT[0],
        {
          **CHAT[1],
          "content": [
            {"type": "text", "text": "a<|im_"},
            {"type": "text", "text": "end|>"},
          ],
        },
      ],
      "message 1: .*special token '<.im_end.>'",
    ),
  ],
)
def test_what_a_template_does_not_write_is_refused_with_its_place(
  tmp_path, conversation, expected
):
  prompt = conversation[:1]
  rows = [
    {"messages": conversation},
    {"prompt": prompt, "completion": conversation[1:]},
  ]
  for row in rows:
    if isinstance(expected, str):
      with pytest.raises(DataError, match=f"rows.jsonl, line 2: {expected}"):
        chats(tmp_path, [{"messages": CHAT}, row])
      continue
    batch = everything(chats(tmp_path, [row]))
    trained = CODER.spell(batch["targets"][batch["loss_mask"] != 0])
    assert trained == "".join(expected)
  if isinstance(expected, str):
    pair = {"chosen": CHAT, "rejected": conversation}
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: {expected}"):
      chats(tmp_path, [pair], preferences=True)


def test_fields_can_be_ignored_in_training_and_later(tmp_path):
  fields = ["name", "tool_calls.id"]
  named = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
  plain = chats(tmp_path, [{"messages": CHAT}])
  source = chats(tmp_path, [{"messages": named}], ignore_fields=fields)
  np.testing.assert_array_equal(
    everything(source)["tokens"], everything(plain)["tokens"]
  )
  for data, refused in (
    ({"prompts": plain.prompts}, True),
    (
      {"prompts": source.prompts},
      False,
    ),
  ):
    run = saved.Saved("run", 0, {}, data, {}, None)
    expected = run.ids_of_chat(CODER, CHAT[:1])
    if refused:
      with pytest.raises(DataError, match="message 0: name: .*'chatml'"):
        run.ids_of_chat(CODER, named[:1])
    else:
      assert run.ids_of_chat(CODER, named[:1]) == expected
    parts = [{"type": "text", "text": "Hello"}]
    asked = [{"role": "user", "content": parts}]
    assert run.ids_of_chat(CODER, asked) == expected
  for wrong in "name", [1]:
    with pytest.raises(ConfigError, match="ignore_fields=.*expected a list"):
      chats(tmp_path, [{"messages": CHAT}], ignore_fields=wrong)
  with pytest.raises(ConfigError, match="'content' cannot be ignored"):
    chats(tmp_path, [{"messages": CHAT}], ignore_fields=["name", "content"])


def test_nulls_of_parquet_files_are_no_fields(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  # A column of structs has the fields of all of them.
  named = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
  table = pyarrow.table({"messages": [CHAT, named]})
  path = str(tmp_path / "rows.parquet")
  parquet.write_table(table.slice(0, 1), path)
  source = supervised.Source(str(GOLDEN), 64, path, template="chatml")
  assert texts(source, CODER)[0][1] == "Hi.<|im_end|>\n"
  parquet.write_table(table, path)
  with pytest.raises(DataError, match="row 1: message 0: name"):
    supervised.Source(str(GOLDEN), 64, path, template="chatml")


def test_special_tokens_in_messages_are_a_choice(tmp_path):
  rows = [{"messages": [CHAT[0], {**CHAT[1], "content": "a</s>b"}]}]
  source = chats(tmp_path, rows, allow_special=True)
  assert texts(source, CODER)[0][1] == "a</s>b<|im_end|>\n"
  assert CODER.eos_id in everything(source)["targets"]
  with pytest.raises(DataError, match="'</s>', .*allow_special=True"):
    chats(tmp_path, rows)


def test_a_template_is_needed_only_for_messages(tmp_path):
  assert len(make(tmp_path, PAIRS)) == 40
  message = "line 1: the tokenizer 'bytes' has no chat template.*chatml"
  with pytest.raises(DataError, match=message):
    make(tmp_path, [{"messages": CHAT}])
  # It has no ids for what templates write.
  with pytest.raises(DataError, match="line 1: .*need a tokenizer.json"):
    make(tmp_path, [{"messages": CHAT}], template="chatml")


@pytest.mark.parametrize(
  "row, field",
  [
    (
      {"messages": [{**CHAT[0], "content": "\ud83d"}, CHAT[1]]},
      r"\[0\].content",
    ),
    (
      {"messages": [CHAT[0], {**CHAT[1], "content": "a\udc00"}]},
      r"\[1\].content",
    ),
    ({"prompt": "a\ud83d", "completion": "b"}, "prompt"),
    ({"prompt": "a", "completion": "\ud83d"}, "completion"),
    ({"text": "\ud83d"}, "text"),
  ],
)
def test_half_a_character_is_an_error_with_its_place(tmp_path, row, field):
  rows = [PAIRS[0], row]
  with pytest.raises(
    DataError, match=rf"rows.jsonl, line 2: \S*{field} .*'\\ud"
  ):
    chats(tmp_path, rows)


def test_fields_without_meaning_may_contain_anything(tmp_path):
  assert len(make(tmp_path, [{**PAIRS[0], "id": "\ud83d"}])) == 1


def test_dates_of_templates_do_not_follow_the_clock(tmp_path):
  template = tmp_path / "t.jinja"
  template.write_text(
    "{{ strftime_now('%Y') if strftime_now is defined else 'never' }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
  )
  for date, text in ((None, "never"), ("2024-07-26", "2024")):
    rows = [{"messages": CHAT}]
    source = chats(tmp_path, rows, template=str(template), date=date)
    assert texts(source, CODER)[0][0].startswith(f"{text}<|user|>")
  with pytest.raises(ConfigError, match="date='May'.*2026-01-31"):
    chats(tmp_path, rows, date="May")


def test_tokens_are_made_once_and_again_if_anything_changes(
  tmp_path, cache, monkeypatch
):
  source = make(tmp_path, PAIRS)
  batch = everything(source)
  encode = row_encoder.Encoder._encode

  def not_again(self, row, num_pictures):
    raise AssertionError("read again")

  monkeypatch.setattr(row_encoder.Encoder, "_encode", not_again)
  name = str(tmp_path / "rows.jsonl")
  packed = supervised.Source("bytes", 32, name, pack=True)
  assert packed.fingerprint() != source.fingerprint()
  cached = supervised.Source("bytes", 64, name)
  assert cached.fingerprint() == source.fingerprint()
  for key, value in everything(cached).items():
    np.testing.assert_array_equal(value, batch[key])
  with pytest.raises(AssertionError, match="read again"):
    supervised.Source("bytes", 64, name, bos=True)
  with pytest.raises(AssertionError, match="read again"):
    make(tmp_path, PAIRS[1:])
  monkeypatch.setattr(row_encoder.Encoder, "_encode", encode)
  source = make(tmp_path, PAIRS[1:])
  for file in cache.glob("*.ids"):
    file.write_bytes(b"")  # Damaged.
  assert len(texts(make(tmp_path, PAIRS[1:]))) == 39


def test_compressed_files_parquet_and_slices(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  expected = texts(make(tmp_path, PAIRS))
  lines = (tmp_path / "rows.jsonl").read_bytes()
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
  parquet.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "b.parquet")
  for name in ("b.jsonl.gz", "b.parquet"):
    source = supervised.Source("bytes", 64, str(tmp_path / name))
    assert texts(source) == expected
  both = supervised.Source("bytes", 64, str(tmp_path / "b.*"))
  assert len(both) == 80 and re.search("b.parquet, row 7", both.where(47))
  part = supervised.Source("bytes", 64, str(tmp_path / "b.*"), slice="[75%:]")
  assert texts(part) == expected[20:]
  chat_rows = [{"messages": CHAT}, {"messages": CHAT * 2}]
  parquet.write_table(pa.Table.from_pylist(chat_rows), tmp_path / "c.parquet")
  source = supervised.Source(
    str(GOLDEN), 64, str(tmp_path / "c.parquet"), template="chatml"
  )
  assert texts(source, CODER)[0][1] == "Hi.<|im_end|>\n"


def test_the_first_example_shows_what_has_a_loss(tmp_path):
  source = make(tmp_path, PAIRS)
  assert source.first_example() == [("0+1=", False), ("x<eos>", True)]
  source = chats(tmp_path, [{"messages": CHAT * 2}])
  text = "".join(f"[{x}]" if loss else x for x, loss in source.first_example())
  turn = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
  assert text == 2 * f"{turn}[Hi.<|im_end|>\n]"


def test_pydoc_has_questions(tmp_path):
  train = supervised.Source("bytes", 256, name="pydoc", too_long="drop")
  test = supervised.Source(
    "bytes", 256, name="pydoc", split="test", too_long="drop"
  )
  assert len(train) > 2000 and 8 < len(train) / len(test) < 10
  pairs = dict(texts(train)) | dict(texts(test))
  question = "math.pow(x, y, /)\n"
  assert pairs[question] == "Return x**y (x to the power of y).<eos>"
  with pytest.raises(ConfigError, match="split: unknown 'tests'"):
    supervised.Source("bytes", 256, name="pydoc", split="tests")
  with pytest.raises(ConfigError, match="split='train' requires a name"):
    make(tmp_path, PAIRS, split="train")


def test_prompts_and_ends_of_new_texts_are_those_of_the_rows(tmp_path):
  source = make(tmp_path, PAIRS, bos=True)
  assert source.prompts == dict(
    bos=True, prefix=False, template=None, variables={}, ignore_fields=[]
  )
  assert source.end_ids == [BYTES.eos_id]
  rows = [{"messages": CHAT}]
  source = chats(
    tmp_path, rows, variables=dict(x=1), ignore_fields=["tool_calls.id", "id"]
  )
  assert source.prompts == dict(
    bos=False,
    prefix=False,
    template="chatml",
    variables=dict(x=1),
    ignore_fields=["id", "tool_calls.id"],
  )
  # The end of a turn, which is not the tokenizer's end of a text.
  assert source.end_ids == [CODER.spellings["<|im_end|>"]] != [CODER.eos_id]


def test_the_prefix_is_the_prompt(tmp_path):
  source = make(tmp_path, PAIRS, prefix=True)
  batch = everything(source)
  assert batch["prefix"].tolist() == [len(row["prompt"]) for row in PAIRS]
  for tokens, size, row in zip(batch["tokens"], batch["prefix"], PAIRS):
    assert BYTES.spell(tokens[:size]) == row["prompt"]
  with pytest.raises(ConfigError, match="prefix=True: expected pack=False"):
    make(tmp_path, PAIRS, prefix=True, pack=True)
