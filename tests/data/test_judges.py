"""Rewards from commands and HTTP addresses, and what happens if these fail."""

import http.server
import json
import pathlib
import sys
import threading
import time

import numpy as np
import pytest
from support.policy_runs import config_of, rows_of

from bigtrain import main
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import prompts
from bigtrain.data.formats import judges
from bigtrain.data.formats.reward_worker import Workers

PROMPTS = [
  judges.Answers({"number": 1}, ["a", "bb"], None),
  judges.Answers({"number": 2}, ["ccc", "d"], None),
]
LENGTHS = [[1.0, 2.0], [3.0, 1.0]]


def judge(spec, time_limit=20.0):
  return list(judges.get(spec, time_limit, Workers(1))(PROMPTS))


def script(tmp_path, code):
  """A command of Python that has the requests in `requests`."""
  path = tmp_path / "judge.py"
  path.write_text(
    "import json, os, pathlib, sys, time\n"
    "requests = [json.loads(line) for line in sys.stdin]\n"
    "here = pathlib.Path(__file__).parent\n" + code
  )
  return [sys.executable, str(path)]


LENGTH_OF = "for each in requests: print(len(each['answer']))\n"


def test_a_command_gets_json_lines_and_prints_numbers(tmp_path):
  code = "print(json.dumps(requests), file=open(here / 'seen', 'a'))\n"
  command = script(tmp_path, code + LENGTH_OF)
  assert judge(dict(command=command)) == LENGTHS
  (seen,) = (tmp_path / "seen").read_text().splitlines()  # One call for all.
  rows = [row for row, texts, _ in PROMPTS for _ in texts]
  assert [each["row"] for each in json.loads(seen)] == rows


@pytest.mark.parametrize(
  ("code", "message"),
  [
    ("print(1)", "expected 4 numbers, got 1"),
    ("print('1 2')\n" * 4, "expected 2 finite numbers, got '1 2'"),
    ("print('nan')\n" * 4, "expected 2 finite numbers, got nan"),
    ("print('no key', file=sys.stderr); sys.exit(3)", "exit code 3: no key"),
    ("os.kill(os.getpid(), 9)", "exit code -9"),
  ],
)
def test_a_command_that_fails_says_why(tmp_path, code, message):
  got = judge(dict(command=script(tmp_path, code)))
  assert len(got) == 2 and all(message in each for each in got)


def test_one_bad_number_spoils_one_prompt(tmp_path):
  code = "print('1\\n2\\ninf\\n4')"
  assert judge(dict(command=script(tmp_path, code))) == [
    [1.0, 2.0],
    "expected 2 finite numbers, got inf",
  ]


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
  """Its child keeps the output open, which must not matter."""
  code = (
    "import subprocess\n"
    "child = subprocess.Popen(['sleep', '300'])\n"
    "(here / 'pid').write_text(str(child.pid))\n"
    "time.sleep(300)\n"
  )
  began = time.monotonic()
  got = judge(dict(command=script(tmp_path, code), time_limit=3))
  assert got == ["it took more than 3 s"] * 2
  assert time.monotonic() - began < 60
  pid = (tmp_path / "pid").read_text()
  deadline = time.monotonic() + 20
  while _runs(pid) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _runs(pid)


def _runs(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def test_a_command_is_tried_again(tmp_path, monkeypatch):
  monkeypatch.setattr(judges, "_FIRST_WAIT_SECS", 0.01)
  code = (
    "(here / 'tries').open('a').write('x')\n"
    "if len((here / 'tries').read_text()) < 3: sys.exit('busy')\n"
  )
  command = script(tmp_path, code + LENGTH_OF)
  assert (
    judge(dict(command=command, retries=1))
    == ["it ended with exit code 1: busy (2 tries)"] * 2
  )
  assert judge(dict(command=command, retries=1)) == LENGTHS


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers as the path says; `server.seen` has the requests."""

  def do_POST(self):
    body = self.rfile.read(int(self.headers["Content-Length"]))
    requests = json.loads(body)
    self.server.seen.append((dict(self.headers), requests))
    lengths = [len(each["answer"]) for each in requests]
    kind = self.path.strip("/")
    tries = sum(1 for _ in self.server.seen)
    status = int(kind) if kind.isdigit() else 200
    content = json.dumps(lengths)
    if kind == "slow":
      # A byte from time to time keeps limits of single reads from ending it.
      self.send_response(200)
      self.end_headers()
      for _ in range(100):
        self.wfile.write(b" ")
        self.wfile.flush()
        time.sleep(0.2)
      return
    if kind == "later" and tries < 3:
      status, content = 503, "busy"
    if kind == "half":
      content = content[:-3]
    if kind == "text":
      content = json.dumps(["1"] * len(requests))
    if kind == "nan":
      content = "[NaN, 1, 2, 3]"
    self.send_response(status)
    cut = 10 if kind == "cut" else 0
    self.send_header("Content-Length", str(len(content) + cut))
    if status == 302:
      self.send_header("Location", "/")
    self.end_headers()
    self.wfile.write(content.encode())

  def log_message(self, *args):
    pass


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
  server.daemon_threads = True
  server.seen = []
  threading.Thread(target=server.serve_forever, daemon=True).start()
  server.url = f"http://127.0.0.1:{server.server_port}"
  yield server
  server.shutdown()
  server.server_close()


def test_an_address_gets_a_list_and_returns_one(server, monkeypatch):
  monkeypatch.setenv("JUDGE_TOKEN", "secret")
  headers = {"Authorization": "Bearer ${JUDGE_TOKEN}"}
  assert judge(dict(url=server.url, headers=headers)) == LENGTHS
  ((seen, requests),) = server.seen  # One call for all.
  assert seen["Authorization"] == "Bearer secret"
  assert requests[2] == {"answer": "ccc", "row": {"number": 2}}


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("404", "HTTP status 404: [1, 2, 3, 1]"),
    ("302", "HTTP status 302: [1, 2, 3, 1]"),
    ("half", "expected a JSON list, got '[1, 2, 3,'"),
    ("cut", "the connection was lost: IncompleteRead"),
    ("text", "expected 2 finite numbers, got '1'"),
  ],
)
def test_an_address_that_answers_something_else_is_told(server, path, message):
  got = judge(dict(url=f"{server.url}/{path}"))
  assert len(got) == 2 and all(each.startswith(message) for each in got)
  assert len(server.seen) == 1


def test_an_address_that_drips_or_is_absent_ends_in_time(server):
  began = time.monotonic()
  got = judge(dict(url=f"{server.url}/slow", time_limit=2))
  assert got == ["it took more than 2 s"] * 2
  server.shutdown()
  server.server_close()
  (message, _) = judge(dict(url=server.url))
  assert "no connection" in message and "refused" in message
  assert time.monotonic() - began < 60


def test_busy_servers_are_tried_again(server, monkeypatch):
  monkeypatch.setattr(judges, "_FIRST_WAIT_SECS", 0.01)
  assert judge(dict(url=f"{server.url}/later", retries=2)) == LENGTHS
  assert len(server.seen) == 3
  # What will not change is not tried again.
  assert "404" in judge(dict(url=f"{server.url}/404", retries=2))[0]
  assert len(server.seen) == 4


def test_not_a_number_names_its_row_or_counts(server, tmp_path):
  rows = [{"prompt": f"{i}+1=", "number": i} for i in range(2)]
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  ids = np.full((2, 2, 2), ord("7") + 3)
  batch = {"targets": ids, "loss_mask": np.ones((2, 2, 2))}
  options = dict(path=str(path), rewards=dict(url=f"{server.url}/nan"))
  source = prompts.Source("bytes", 8, **options)
  with pytest.raises(DataError, match="row 0 .*/nan: expected 2 finite"):
    source.judge(np.arange(2), batch)
  source = prompts.Source("bytes", 8, **options, failed_reward=-1.0)
  got = source.judge(np.arange(2), batch)
  assert got["reward"].tolist() == [[-1, -1], [2, 3]]
  assert got["failed_rewards"].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    (dict(comand="x"), "expected either command or url.*Did you mean"),
    (dict(command="x", url="y"), "expected either command or url"),
    (dict(command="no-such-program --x"), "no program 'no-such-program'"),
    (dict(command=[]), "expected a program with arguments"),
    (dict(url="ftp://x"), "expected http:// or https://"),
    ("http://x/", "expected dict.url="),
    (dict(url="http://x", headers=dict(A="$NO_SUCH_ONE")), "no variable NO_SU"),
    (dict(url="http://x", retry=3), "rewards.retry: unknown key.*retries"),
    (dict(url="http://x", retries=-1), "rewards: retries"),
    (5, "expected the dotted path"),
  ],
)
def test_mistakes_in_the_config_are_told(spec, message):
  with pytest.raises(ConfigError, match=message):
    judges.get(spec, 10.0, Workers(1))


@pytest.mark.slow
def test_a_run_learns_from_a_command_and_an_address(server, tmp_path, caplog):
  command = dict(command=script(tmp_path, LENGTH_OF), time_limit=60)
  config = config_of(total_steps=2)
  both = [(command, 0.5), (dict(url=server.url, time_limit=60), 0.5)]
  config["input"]["data"]["rewards"] = both
  main.train(config | dict(stop_at_steps=1), str(tmp_path / "run"))
  assert "judged again" not in caplog.text
  main.train(config, str(tmp_path / "run"))
  assert f"judged again by command '{sys.executable}" in caplog.text
  rows = [row for row in rows_of(tmp_path / "run") if "loss" in row]
  assert len(server.seen) == len(rows) == 2
  for (_, requests), row in zip(server.seen, rows):
    assert len(requests) == 8 * 4 and requests[0]["row"]["prompt"]
    mean = np.mean([len(each["answer"]) for each in requests])
    np.testing.assert_allclose(row["reward"], mean, rtol=1e-6)


def waits(texts, row):
  """Ends when as many calls as processes have begun."""
  folder = pathlib.Path(row["folder"])
  (folder / str(row["number"])).touch()
  while len(list(folder.iterdir())) < 3:
    time.sleep(0.01)
  return [row["number"]] * len(texts)


@pytest.mark.slow
def test_several_processes_call_functions_at_the_same_time(tmp_path):
  rows = [{"number": i, "folder": str(tmp_path)} for i in range(3)]
  answers = [judges.Answers(row, ["a"], None) for row in rows]
  get = lambda n: judges.get(f"{__name__}.waits", 30.0, Workers(n))
  assert list(get(3)(answers)) == [[0.0], [1.0], [2.0]]


def test_no_call_follows_an_error():
  workers, made = Workers(2), []

  def fail(item):
    made.append(item)
    time.sleep(0.05)
    raise DataError(str(item))

  with pytest.raises(DataError, match="0"):
    list(workers.map(fail, range(100)))
  assert len(made) < 100
