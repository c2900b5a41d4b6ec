"""How tools end: exit codes, and what is on standard error."""

import subprocess
import sys
import textwrap

import pytest
from support import processes

from bigtrain.checkpoints.manifest import DamagedError
from bigtrain.config.errors import ConfigError
from bigtrain.tools import exits


@pytest.mark.parametrize(
  ("error", "code", "line"),
  [
    (ConfigError("no such key"), 2, "error: no such key\n"),
    (FileNotFoundError(2, "gone", "x"), 1, "error: [Errno 2] gone: 'x'\n"),
    (DamagedError("step 3"), 1, "error: step 3\n"),
    (ArithmeticError("named"), 1, "error: named\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
  ],
)
def test_errors_are_one_line(error, code, line, capsys):
  @exits.in_one_line(ArithmeticError)
  def main(argv):
    raise error

  assert main(["--x"]) == code
  assert capsys.readouterr().err == line


@pytest.mark.parametrize(
  "code",
  [
    "signal.raise_signal(signal.SIGINT)",
    # Python ignores exceptions of these callbacks; jax has one.
    """
gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGINT))
gc.collect()
gc.callbacks.clear()
time.sleep(60)
""",
  ],
)
def test_ctrl_c_while_a_tool_imports(code, tmp_path):
  (tmp_path / "numpy.py").write_text(f"import gc, signal, time\n{code}")
  ended = subprocess.run(
    [sys.executable, "-m", "bigtrain.tools.report", "."],
    cwd=tmp_path,  # Python looks here first.
    env=processes.environment(),
    capture_output=True,
    text=True,
    check=False,
  )
  assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_other_exceptions_pass():
  @exits.in_one_line()
  def main(argv):
    raise ArithmeticError("a defect")

  with pytest.raises(ArithmeticError, match="a defect"):
    main([])


def test_arguments_are_the_command_line_unless_given(monkeypatch):
  @exits.in_one_line()
  def main(argv):
    return len(argv)

  monkeypatch.setattr(sys, "argv", ["tool", "one", "two"])
  assert main() == 2
  assert main(["one"]) == 1


@pytest.mark.parametrize("lines", [1, 100_000])  # In the buffer, or beyond.
def test_a_pipe_whose_reader_has_ended(lines):
  text = f"""
    import sys
    from bigtrain.tools import exits

    @exits.in_one_line()
    def main(argv):
      sys.stdin.read()
      for number in range({lines}):
        print(number)
      return 0

    sys.exit(main())
    """
  pipe = subprocess.PIPE
  process = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(text)],
    stdin=pipe,
    stdout=pipe,
    stderr=pipe,
  )
  process.stdout.close()
  process.stdin.close()
  with process:
    assert process.stderr.read() == b""
  assert process.returncode == 0
