"""The tool that continues a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bigtrain
from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.manifest import HostState
from bigtrain.models import decoder
from bigtrain.tasks import language_modeling
from bigtrain.text import tokenizers
from bigtrain.tools import generate as tool

MODEL = dict(
  variant="gpt2",
  vocab_size=259,
  width=8,
  depth=1,
  num_heads=2,
  max_len=16,
  init_std=1.0,
)


def save(folder, params, **changes):
  config = {
    "task": "language_modeling",
    "model_name": "decoder",
    "model": MODEL,
    "input": {"data": {"type": "text", "path": "x.txt", "length": 16}},
  }
  saver = checkpointer.Checkpointer(str(folder))
  state = {"params": params, "step": np.int32(1)}
  saver.save(1, state, HostState(config=config | changes))
  saver.close()
  return str(folder)


@pytest.fixture(scope="module")
def params():
  model = decoder.Model(**MODEL)
  return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))[
    "params"
  ]


@pytest.fixture(scope="module")
def workdir(params, tmp_path_factory):
  return save(tmp_path_factory.mktemp("run"), params)


def greedy(params, ids, number):
  """Greedy continuation of `ids`, by a full forward pass per token."""
  model = decoder.Model(**MODEL)
  forward = jax.jit(lambda t: model.apply({"params": params}, t)[0][0])
  seen, view = list(ids), list(ids)
  for _ in range(number):
    if len(view) == MODEL["max_len"] + 1:
      view = seen[-MODEL["max_len"] // 2 :]
    padded = view + [0] * (MODEL["max_len"] - len(view))
    token = int(jnp.argmax(forward(jnp.asarray([padded]))[len(view) - 1]))
    seen.append(token)
    view.append(token)
  return seen[len(ids) :]


@pytest.mark.slow
def test_text_continues_beyond_the_context_length(workdir, params):
  """The text outgrows the context twice."""
  new = 30
  expected = greedy(params, [ord("a") + 3, ord("b") + 3], new)
  pieces = tool.generate(workdir, "ab", max_new=new, temperature=0)
  text = bytes(b - 3 for b in expected if b >= 3).decode("utf-8", "replace")
  assert "".join(pieces) == text and text


def test_seeds_and_the_command_line(workdir, capsys):
  def run(*arguments):
    code = tool.main([f"--workdir={workdir}", "--max_new=12", *arguments])
    assert code == 0
    return capsys.readouterr().out

  sampling = ("--temperature=0.8", "--top_k=50")
  one = run("--prompt=def ", "--seed=1", *sampling)
  assert one.startswith("def ") and one.endswith("\n")
  # From the begin token alone, and with another seed.
  assert len(run("--seed=2")) > 1
  assert run("--prompt=def ", "--seed=2", *sampling) != one


def test_decoding_is_that_of_load_and_told(workdir, capsys):
  expected = bigtrain.load(workdir).generate("ab", max_new=6)["text"]
  arguments = [f"--workdir={workdir}", "--prompt=ab", "--max_new=6"]
  assert tool.main(arguments) == 0
  out, err = capsys.readouterr()
  assert out == f"ab{expected}\n"
  assert err.splitlines()[-1] == "decoding: the most likely token"
  flags = ["--temperature=0.7", "--top_p=0.9", "--repetition_penalty=1.5"]
  assert tool.main([*arguments, *flags, "--seed=3"]) == 0
  assert capsys.readouterr().err.splitlines()[-1] == (
    "decoding: sampling, temperature=0.7, top_p=0.9, seed=3, "
    "repetition_penalty=1.5"
  )


@pytest.mark.slow
def test_a_beam_search_prints_what_the_task_generates(workdir, params, capsys):
  tokens = tokenizers.get("bytes")
  options = dict(max_new=6, num_beams=3, length_penalty=0.5)
  expected = language_modeling.generate(
    {"params": params},
    {"tokens": jnp.asarray([tokens.encode("def ")])},
    model=decoder.Model(**MODEL),
    eos_id=tokens.eos_id,
    pad_id=-1,
    **options,
  )[0].tolist()
  arguments = [f"--{name}={value}" for name, value in options.items()]
  code = tool.main([f"--workdir={workdir}", "--prompt=def ", *arguments])
  kept = [t for t in expected if t not in (tokens.eos_id, -1)]
  assert code == 0
  assert capsys.readouterr().out == f"def {tokens.decode(kept)}\n"


@pytest.mark.parametrize(
  "arguments, message",
  [
    (
      ["--workdir={w}", "--num_beams=2", "--temperature=0.5"],
      "expected num_beams=1 or temperature=0, got 2 and 0.5",
    ),
    (
      ["--workdir={w}", "--num_beams=2", "--prompt=ab", "--max_new=15"],
      "--max_new: expected at most 14 in a beam search",
    ),
    (["--workdir={w}/none"], "no such file"),
    (["--workdir={w}", "--temperature=-1"], "temperature"),
    (["--workdir={w}", "--top_k=5"], "--top_k=5: expected --temperature above"),
    (["--workdir={w}", "--prefix=emma"], "prefix"),
    (["--workdir={w}", "--tokenizer=none.json"], "none.json"),
  ],
)
def test_mistakes_give_a_one_line_error(workdir, capsys, arguments, message):
  arguments = [a.format(w=workdir) for a in arguments]
  assert tool.main(arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ") and message in error


def test_the_task_must_be_language_modeling(params, tmp_path, capsys):
  workdir = save(tmp_path, params, task="captioning")
  assert tool.main([f"--workdir={workdir}", "--prompt=x"]) == 2
  printed = capsys.readouterr()
  assert "its task is 'captioning'" in printed.err and printed.out == ""


def test_a_run_without_a_tokenizer_needs_one(params, tmp_path, capsys):
  data = {"type": "tokens", "path": "tokens", "length": 16}
  workdir = save(tmp_path, params, input={"data": data})
  assert tool.main([f"--workdir={workdir}", "--prompt=x"]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: --tokenizer: missing, and ")
  assert error.endswith("expected the path of one, or 'bytes'.\n")
