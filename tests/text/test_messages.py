"""Messages under templates that do not write all of them, or not as text."""

import json
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.text import chat, messages, tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = [
  path.stem for path in GOLDEN.glob("*.json") if "token" not in path.stem
]
NAMES = [*chat.NAMES, *(f"trl/{name}" for name in PUBLISHED)]
# Templates that write tool calls, thoughts, or the content of parts.
CALLS = ("trl/qwen3", "trl/qwen3_instruct_2507")
THOUGHTS = ("qwen3", "trl/qwen3")
PARTS = ("trl/smolvlm",)

CHAT = [
  {"role": "user", "content": "Hello"},
  {"role": "assistant", "content": "Hi."},
]
CALL = {
  "type": "function",
  "function": {"name": "weather", "arguments": {"city": "Bern"}},
}
ASKED = {"role": "user", "content": "What is the weather in Bern?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


def get(name):
  if not name.startswith("trl/"):
    return chat.get(name, str(GOLDEN))
  golden = json.loads((GOLDEN / f"{name[4:]}.json").read_text())
  return chat.Template(name, {"default": golden["template"]}, TOKENS)


def template(text):
  return chat.Template("test", {"default": text}, TOKENS)


def write(made, conversation, tools=None, **options):
  return made.render(
    messages.readable(made, conversation, tools, **options), tools
  )


def parts(*texts):
  return [{"type": "text", "text": text} for text in texts]


def answer(**fields):
  return [CHAT[0], {**CHAT[1], **fields}]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_written_or_refused(name):
  made = get(name)
  if name in CALLS:
    text = write(made, [ASKED, CALLED])
    assert '{"name": "weather", "arguments": {"city": "Bern"}}' in text
    assert "None" not in text and "null" not in text
    empty = write(made, [ASKED, {**CALLED, "content": ""}])
    absent = {key: CALLED[key] for key in ("role", "tool_calls")}
    assert text == empty == write(made, [ASKED, absent])
    return
  with pytest.raises(DataError, match="message 1: tool_calls: the template "):
    write(made, [ASKED, CALLED])
  message = "message 1: content: expected a text, .* got null"
  with pytest.raises(DataError, match=message):
    write(made, [ASKED, CALLED], ignore_fields=["tool_calls"])


@pytest.mark.parametrize("name", NAMES)
def test_texts_in_parts_are_joined_or_read_by_the_template(name):
  made = get(name)
  conversation = [
    {"role": "user", "content": parts("Say hello", ".")},
    {"role": "assistant", "content": parts("Hello.")},
  ]
  text = write(made, conversation)
  assert "Say hello." in text and "Hello." in text
  assert "type" not in text and "{" not in text
  plain = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
  ]
  assert write(made, plain) == text
  assert (made.render(plain) != text) == (name in PARTS)
  picture = [{"type": "image_url", "image_url": {"url": "x.png"}}]
  with pytest.raises(DataError, match=r"message 0: content"):
    write(made, [{"role": "user", "content": picture}, CHAT[1]])
  image = [*parts("What is it?"), {"type": "image"}]
  if name not in (*PARTS, "trl/gemma3"):  # These write "<image>".
    with pytest.raises(DataError, match=r"message 0: content"):
      write(made, [{"role": "user", "content": image}, CHAT[1]])


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_written_or_refused(name):
  made = get(name)
  thoughts = "First this, then that."
  conversation = answer(reasoning_content=thoughts)
  if name in THOUGHTS:
    assert f"<think>\n{thoughts}\n</think>\n\nHi." in write(made, conversation)
  else:
    message = (
      r"message 1: reasoning_content: .*ignore_fields=.'reasoning_content'\]"
    )
    with pytest.raises(DataError, match=message):
      write(made, conversation)
  without = write(made, conversation, ignore_fields=["reasoning_content"])
  assert without == write(made, CHAT)


@pytest.mark.parametrize(
  ("content", "got"),
  [
    (5, "5"),
    (0.5, "0.5"),
    (True, "True"),
    (None, "null"),
    ({"text": "yo"}, "{'text': 'yo'}"),
    (["yo"], "'yo'"),
    ([{"type": "text", "text": 5}], ".*5}"),
  ],
)
@pytest.mark.parametrize("name", ["chatml", "trl/llama3", "trl/smolvlm"])
def test_content_that_is_no_text_is_refused(name, content, got):
  message = f"message 0: content: expected a text, .*, got {got}"
  with pytest.raises(DataError, match=message):
    write(get(name), [{"role": "user", "content": content}, CHAT[1]])


def test_messages_without_content_or_with_another_role_are_refused():
  made = get("chatml")
  with pytest.raises(DataError, match="message 1: content: .*got nothing"):
    write(made, [CHAT[0], {"role": "assistant"}])
  with pytest.raises(
    DataError, match="message 0: role: expected a text, got 5"
  ):
    write(made, [{"role": 5, "content": "x"}])
  with pytest.raises(DataError, match="messages: expected a list"):
    write(made, "Hello")


@pytest.mark.parametrize(
  ("fields", "name"),
  [
    (dict(name="Ann"), "name"),
    (dict(id=17), "id"),
    (dict(train=False), "train"),
    (dict(index=0), "index"),
    (dict(refusal="No.", audio={"id": "a"}), "refusal, audio"),
    (dict(function_call={"name": "f", "arguments": "{}"}), "function_call"),
    (dict(content=[{**parts("a")[0], "cache": 1}]), r"content.*'cache': 1"),
  ],
)
def test_fields_that_a_template_does_not_write_are_refused(fields, name):
  with pytest.raises(DataError, match=f"message 1: {name}"):
    write(get("chatml"), answer(**fields))


def test_fields_without_a_value_are_no_fields():
  made = get("chatml")
  fields = dict(name=None, tool_calls=[], refusal="", audio={})
  assert write(made, answer(**fields)) == made.render(CHAT)
  # Parquet files have null for what a part of another kind has.
  content = [{**parts("Hi.")[0], "image": None}]
  assert write(made, answer(content=content)) == made.render(CHAT)
  # The template would write "None".
  named = template(TURN.replace("m.content", "m.content ~ (m['name'])"))
  assert "None" not in write(named, answer(name=None))
  assert "Hi.Ann" in write(named, answer(name="Ann"))
  assert messages.readable(made, answer(weight=0)) == answer(weight=0)


def test_fields_inside_of_calls_are_refused_and_ignored_by_their_path():
  made = get("trl/qwen3")
  called = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "call_1"}]}
  replied = [
    {"role": "tool", "content": "rain", "tool_call_id": "call_0"},
    {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
  ]
  conversation = [ASKED, called, *replied, CHAT[1]]
  # The hint has the fields of all messages.
  message = (
    r"message 1: tool_calls\[1\].id: .*=.'tool_calls.id', 'tool_call_id'"
  )
  with pytest.raises(DataError, match=message):
    write(made, conversation)
  with pytest.raises(DataError, match="message 2: tool_call_id: "):
    write(made, conversation, ignore_fields=["tool_calls.id"])
  fields = ["tool_calls.id", "tool_call_id"]
  text = write(made, conversation, ignore_fields=fields)
  assert text.count("weather") == 3 and "sun" in text and "call_" not in text
  # A template that writes only the first of two calls.
  first = template(TURN + "{{ (messages[1].tool_calls | first) | tojson }}")
  with pytest.raises(DataError, match=r"tool_calls\[1\].function.name, .*city"):
    write(first, [ASKED, {**CALLED, "tool_calls": [CALL, CALL]}])


def test_pythons_spelling_of_a_call_is_refused():
  spelled = template(
    "{% for m in messages %}{{ m.content or '' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}"
  )
  message = r"message 1: tool_calls\[0\].function.arguments: .*Python's .*JSON"
  with pytest.raises(DataError, match=message):
    write(spelled, [ASKED, CALLED])
  call = {"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
  text = write(spelled, [ASKED, {**CALLED, "tool_calls": [call]}])
  assert text.endswith('weather{"city": "Bern"}')


@pytest.mark.parametrize(
  "content",
  [
    "{{ m.content }}",  # None
    "{{ m.content | tojson }}",  # null
    "{{ m.content | trim }}",
    "{{ m.content if m.content is not none else '' }}",
    # As in DeepSeek's: an empty text hides the calls.
    "{{ m.content if m.content is string else m.tool_calls[0].x }}",
  ],
)
def test_missing_content_is_never_spelled(content):
  text = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{content}"
  if "x" not in content:
    text += "{{ m.tool_calls[0].x if m.tool_calls }}"
  made = template(text + "</s>{% endfor %}")
  called = {"role": "assistant", "content": None, "tool_calls": [{"x": "f()"}]}
  result = write(made, [ASKED, called])
  assert "f()" in result and "None" not in result and "null" not in result


def test_a_role_that_a_template_does_not_write_is_refused():
  only = template(
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}"
    "{% endif %}{% endfor %}"
  )
  conversation = [*CHAT, {"role": "tool", "content": "6"}, CHAT[1]]
  with pytest.raises(DataError, match="message 2: content: .*role 'tool'"):
    write(only, conversation)


def test_thoughts_that_a_template_drops_later_are_written():
  """`chat.supervised` refuses them unless only the last answer has a loss."""
  made = template(
    "{% for m in messages %}{% if loop.last %}{{ m.thinking }}{% endif %}"
    "{{ m.content }}{% endfor %}"
  )
  conversation = answer(thinking="1+1") + answer(thinking="2+2")
  assert write(made, conversation) == "HelloHi.Hello2+2Hi."


def test_what_the_template_refuses_it_says_itself():
  with pytest.raises(ConfigError, match="roles must alternate"):
    write(get("trl/gemma"), [*CHAT, CHAT[1]])
  with pytest.raises(ConfigError, match="roles must alternate"):
    write(get("trl/gemma"), [*CHAT, {**CHAT[1], "content": parts("a")}])


TEXTS = st.text(st.sampled_from("ab 1\n.é日<|>{'}"), max_size=8)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
  st.sampled_from([name for name in NAMES if name not in PARTS]),
  st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
)
def test_plain_conversations_stay_as_they_are(name, turns):
  conversation = []
  for question, reply in turns:
    conversation.append({"role": "user", "content": question})
    conversation.append({"role": "assistant", "content": reply})
  made = get(name)
  assert messages.readable(made, conversation) == conversation
  # So do two answers in a row, where a template takes them.
  if name in chat.NAMES:
    assert messages.readable(made, [*CHAT, CHAT[1]]) == [*CHAT, CHAT[1]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_conversations_of_trl_have_its_ids(name):
  coder = tokenizers.get(str(GOLDEN))
  made = get(f"trl/{name}")
  fields = ["reasoning_content", "tool_calls", "name"]
  for case in json.loads((GOLDEN / f"{name}.json").read_text())["cases"]:
    conversation, tools = case["messages"], case["tools"]
    ignored = [] if f"trl/{name}" in CALLS + THOUGHTS else fields
    if tools:
      ignored = ["name"] if f"trl/{name}" in CALLS else fields
    if name == "qwen3_instruct_2507":
      ignored.append("reasoning_content")
    result = messages.readable(made, conversation, tools, ignore_fields=ignored)
    ids, trained = chat.supervised(made, coder, result, tools)
    if f"trl/{name}" not in PARTS:  # TRL leaves the texts out.
      assert ids.tolist() == case["ids"]
      assert trained.tolist() == [bool(x) for x in case["mask"]]


@pytest.mark.parametrize(
  "spelling", ['{"city": "Bern"}', '{"city":"Bern"}', "{}"]
)
def test_arguments_in_json_are_never_quoted(spelling):
  """OpenAI's files have arguments as JSON in a text."""
  function = {"name": "weather", "arguments": spelling}
  spelled = [{"type": "function", "id": "1", "function": function}]
  conversation = [ASKED, {**CALLED, "tool_calls": spelled}]
  options = dict(ignore_fields=["tool_calls.id"])
  as_json = template(
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
  )
  expected = json.dumps(json.loads(spelling))
  assert write(as_json, conversation, **options).endswith(f"weather{expected}")
  # Templates that copy the text, or read both, get it as it is.
  copied = template(as_json.texts["default"].replace(" | tojson", ""))
  assert write(copied, conversation, **options).endswith(f"weather{spelling}")
  if spelling != "{}":
    text = write(get("trl/qwen3"), conversation, **options)
    assert spelling in text and json.dumps(spelling) not in text
  # A text that is no JSON stays one.
  function["arguments"] = "Bern"
  assert write(as_json, conversation, **options).endswith('weather"Bern"')
