"""Training in the kernel of a notebook, and docs/digits.ipynb."""

import json
import queue
import shutil
import time

import pytest
import tiny
from support import compile_cache, processes

from bigtrain.checkpoints import folders

NOTEBOOK = processes.ROOT / "docs" / "digits.ipynb"

pytestmark = pytest.mark.slow


def outputs(notebook, kind):
  """Outputs of a kind of all code cells."""
  return [
    output
    for cell in notebook["cells"]
    for output in cell.get("outputs", ())
    if output["output_type"] == kind
  ]


def check(notebook):
  """Asserts that the outputs show what a reader should see."""
  assert not outputs(notebook, "error")
  streams = outputs(notebook, "stream")
  assert {output["name"] for output in streams} == {"stdout"}
  text = "".join("".join(output["text"]) for output in streams)
  for words in ("Step 0 of 600, from scratch.", "val/acc", "are wrong"):
    assert words in text
  displays = [output["data"] for output in outputs(notebook, "display_data")]
  table, *pictures = displays
  html = "".join(table["text/html"])
  assert 'value="600"' in html and "finished | 600/600 100%" in html
  assert html.count("<tr>") == 9  # The names, and the newest rows.
  assert len(pictures) == 2 and all("image/png" in p for p in pictures)
  accuracy, answer = outputs(notebook, "execute_result")
  assert float("".join(accuracy["data"]["text/plain"])) > 0.85
  assert "'label':" in "".join(answer["data"]["text/plain"])


def test_the_notebook_in_docs_has_its_outputs():
  text = NOTEBOOK.read_text()
  check(json.loads(text))
  assert len(text) < 200_000
  assert "/tmp/" not in text and "/home/" not in text and "/root" not in text


@pytest.fixture
def environment(monkeypatch):
  pytest.importorskip("ipykernel", reason="pip install 'bigtrain[notebook]'")
  pytest.importorskip("nbclient", reason="pip install 'bigtrain[notebook]'")
  home = {"XDG_CACHE_HOME": str(compile_cache.FOLDER / "home")}
  for name, value in processes.environment(**home).items():
    monkeypatch.setenv(name, value)


def test_the_notebook_in_docs_runs(environment, tmp_path):
  import nbclient
  import nbformat

  pytest.importorskip("matplotlib")
  pytest.importorskip("sklearn")
  notebook = nbformat.read(shutil.copy(NOTEBOOK, tmp_path), as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=processes.LIMIT_SECS,
    kernel_name="python3",
    coalesce_streams=True,
    resources={"metadata": {"path": str(tmp_path)}},
  )
  client.execute()
  check(notebook)


class Kernel:
  """A kernel that runs cells."""

  def __init__(self, folder):
    from jupyter_client.manager import start_new_kernel

    self._manager, self._client = start_new_kernel(
      kernel_name="python3", cwd=str(folder)
    )
    self.text = ""  # What cells have printed.
    self.shown = ""  # The newest display.

  def start(self, code):
    """Starts a cell."""
    self.text = self.shown = ""
    return self._client.execute(code)

  def interrupt(self):
    """Does what the stop button does."""
    self._manager.interrupt_kernel()

  def wait(self, until=None):
    """Waits for the end of the cell, or for words; returns its error if any."""
    deadline, error = time.monotonic() + processes.LIMIT_SECS, None
    while time.monotonic() < deadline:
      if until and until in self.text + self.shown:
        return None
      try:
        message = self._client.get_iopub_msg(timeout=1)
      except queue.Empty:
        assert self._manager.is_alive(), self.text
        continue
      content, kind = message["content"], message["msg_type"]
      if kind == "stream":
        self.text += content["text"]
      elif kind in ("display_data", "update_display_data"):
        self.shown = content["data"]["text/plain"]
      elif kind == "error":
        error = content
      elif kind == "status" and content["execution_state"] == "idle":
        return error
    raise AssertionError(f"the cell did not end:\n{self.text}")

  def close(self):
    """Ends the kernel."""
    self._client.stop_channels()
    self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(environment, tmp_path):
  result = Kernel(tmp_path)
  yield result
  result.close()


_TRAIN = """
from bigtrain import main
config = {config!r}
main.train(config, "run")["step"]
"""


def test_an_interrupt_saves_and_the_cell_continues(kernel, tmp_path):
  tiny.write_data(tmp_path)
  changes = {"total_steps": 1_000_000, "ckpt_steps": 1_000_000}
  changes |= {"log_steps": 10, "evals": None}
  config = tiny.config(tmp_path, changes)
  kernel.start(_TRAIN.format(config=config))
  kernel.wait(until="step 50/1000000")
  kernel.interrupt()
  error = kernel.wait()
  assert error["ename"] == "Interrupted"
  (saved,) = folders.steps(str(tmp_path / "run"))
  assert 50 <= saved < 1_000_000
  line = f"saved step {saved} of 1000000. Call train again to continue."
  assert error["traceback"] == [f"Interrupted: {line}"]
  assert "Interrupted: saving" in kernel.text
  # The same kernel continues the run.
  config |= {"stop_at_steps": saved + 5}
  kernel.start(_TRAIN.format(config=config))
  assert kernel.wait() is None, kernel.text
  assert f"resumed from step {saved}" in kernel.text
  assert folders.steps(str(tmp_path / "run"))[-1] == saved + 5
  # Outside of a run, an interrupt is Python's own.
  kernel.start("import time; print('here', flush=True); time.sleep(100)")
  kernel.wait(until="here")
  kernel.interrupt()
  assert kernel.wait()["ename"] == "KeyboardInterrupt"
