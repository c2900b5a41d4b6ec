"""The launch scripts, with fakes of the programs that they start.

tests/schedulers runs them under real launchers.
"""

import os
import pathlib
import subprocess
import time

import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parent.parent / "launch"
FLAGS = ["--config=x.py", "--workdir=a folder"]


@pytest.fixture
def run(tmp_path):
  """run(script, *arguments, programs={name: shell}, **environment).

  Each program of `programs` is a shell script, which may write to the file
  `$NOTES`. Returns (exit code, output, lines of that file).
  """

  def call(script, *arguments, programs, cwd=None, **environment):
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
      (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
      (folder / name).chmod(0o755)
    notes = tmp_path / "notes"
    notes.write_text("")
    ended = subprocess.run(
      ["bash", LAUNCH / script, *arguments],
      env={
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NOTES": str(notes),
        "PYTHON": str(folder / "python"),
        "LOGS": str(tmp_path / "logs"),
        **environment,
      },
      cwd=cwd or tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )
    output = ended.stdout + ended.stderr
    return ended.returncode, output, notes.read_text().splitlines()

  return call


@pytest.mark.parametrize(
  "code, restarts, requeued",
  [(75, 0, True), (75, 2, True), (75, 3, False), (0, 0, False)]
  + [(1, 0, False), (2, 0, False)],
)
def test_slurm_requeues_75_up_to_a_limit(run, code, restarts, requeued):
  exit_code, output, notes = run(
    "slurm.sbatch",
    *FLAGS,
    programs={
      "srun": f'echo "$@" >>"$NOTES"; exit {code}',
      "scontrol": 'echo "$@" >>"$NOTES"',
      "sleep": ":",
    },
    MOST_REQUEUES="3",
    SLURM_JOB_ID="17",
    SLURM_RESTART_COUNT=str(restarts),
  )
  assert exit_code == code
  assert "-m bigtrain.main --config=x.py --workdir=a folder" in notes[0]
  assert notes[1:] == (["requeue 17"] if requeued else [])
  assert ("not requeued: 3 restarts" in output) == (restarts == 3)


@pytest.mark.parametrize("code, requeued", [(1, True), (137, True), (2, False)])
def test_slurm_requeues_failures_after_progress(run, tmp_path, code, requeued):
  saved = tmp_path / "a folder" / "checkpoints" / "00000010"
  _, _, notes = run(
    "slurm.sbatch",
    *FLAGS,
    programs={
      "srun": f'mkdir -p "{saved}"; exit {code}',
      "scontrol": 'echo "$@" >>"$NOTES"',
      "sleep": ":",
    },
    SLURM_JOB_ID="17",
  )
  assert notes == (["requeue 17"] if requeued else [])


def test_slurm_in_a_container(run):
  _, _, notes = run(
    "slurm.sbatch",
    *FLAGS,
    programs={"srun": 'printf "%s\\n" "$@" >>"$NOTES"'},
    CONTAINER="--container-image=a --container-mounts=/b:/b",
  )
  assert {"--container-image=a", "--container-mounts=/b:/b"} <= set(notes)


PROCESS = 'echo "gpu ${CUDA_VISIBLE_DEVICES:-none} $@" >>"$NOTES"; exit '


def test_local_gives_each_process_a_gpu(run):
  gpus = {"nvidia-smi": "echo GPU 0; echo GPU 1"}
  code, output, notes = run(
    "local.sh",
    "2",
    *FLAGS,
    programs=gpus | {"python": PROCESS + "0"},
    PORT="5",
  )
  assert code == 0, output
  main = "-m bigtrain.main --config=x.py --workdir=a folder"
  assert sorted(notes) == [
    f"gpu {i} {main} --coordinator=localhost:5 --num_processes=2 "
    f"--process_id={i}"
    for i in range(2)
  ]
  code, output, notes = run("local.sh", "3", *FLAGS, programs=gpus, PORT="5")
  assert (code, notes) == (2, [])
  assert "3 processes need a GPU each, but this machine has 2" in output


@pytest.mark.parametrize("codes, code", [((0, 2), 2), ((75, 75), 75)])
def test_local_exits_with_the_code_of_the_job(run, codes, code):
  python = f'[[ "$*" == *--process_id=0 ]] && exit {codes[0]}; exit {codes[1]}'
  programs = {"python": python, "nvidia-smi": "true"}
  exit_code, _, _ = run("local.sh", "2", *FLAGS, programs=programs, PORT="5")
  assert exit_code == code


def test_local_starts_again_under_the_supervisor(run):
  programs = {"python": 'printf "%s\\n" "$@" >>"$NOTES"; exit 75'}
  code, _, notes = run("local.sh", "2", *FLAGS, programs=programs, RESTARTS="3")
  assert code == 75
  supervisor = ["-m", "bigtrain.tools.supervise", "--failures=3", "--"]
  assert notes == [*supervisor, "bash", str(LAUNCH / "local.sh"), "2", *FLAGS]


# Starts ranks like MPICH: mpirun -np N COMMAND.
MPIRUN = """
number=$2
shift 2
for ((i = 0; i < number; i++)); do
  PMI_RANK=$i PMI_SIZE=$number "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""


def test_mpi_gives_each_rank_the_address_of_rank_0(run):
  rank = "$JAX_COORDINATOR_ADDRESS $JAX_PROCESS_ID/$JAX_NUM_PROCESSES"
  code, output, notes = run(
    "mpi.sh",
    *("-np", "2", "--", *FLAGS),
    programs={
      "mpirun": MPIRUN,
      "hostname": "echo here",
      "python": f'echo "{rank} $@" >>"$NOTES"; exit 75',
    },
    PORT="5",
  )
  assert code == 75, output
  main = "-m bigtrain.main --config=x.py --workdir=a folder"
  assert sorted(notes) == [f"here:5 0/2 {main}", f"here:5 1/2 {main}"]


# Runs the commands for a worker on this machine, and notes all others.
GCLOUD = """
for word in "$@"; do
  if [[ "$word" == --command=* ]]; then exec bash -c "${word#--command=}"; fi
done
echo "$@" >>"$NOTES"
"""


def test_a_tpu_slice_is_created_and_deleted(run):
  def tpu_vm(*arguments, **environment):
    named = dict(TPU="mine", ZONE="there") | environment
    return run("tpu_vm.sh", *arguments, programs={"gcloud": GCLOUD}, **named)

  code, output, notes = tpu_vm(
    "create", TYPE="v4-32", VERSION="tpu-vm", OPTIONS="--spot --labels=a=b"
  )
  assert code == 0, output
  assert notes == [
    "compute tpus queued-resources create mine --node-id=mine "
    "--accelerator-type=v4-32 --runtime-version=tpu-vm --spot --labels=a=b "
    "--zone=there"
  ]
  code, _, notes = tpu_vm("delete")
  assert (code, len(notes)) == (0, 1) and "delete mine --force" in notes[0]
  for wrong in (tpu_vm(), tpu_vm("creat")):
    assert wrong[0] == 2 and "launch/tpu_vm.sh run --config=" in wrong[1]
  code, output, notes = tpu_vm("create", ZONE="")
  assert code and "its zone" in output and not notes


def test_a_run_on_a_tpu_slice_is_detached_and_stopped(run, tmp_path):
  bin_folder = tmp_path / "bigtrain" / ".venv" / "bin"
  bin_folder.mkdir(parents=True)
  # A fake program that saves on SIGTERM.
  (bin_folder / "python").write_text(
    "#!/usr/bin/env bash\n"
    "trap 'echo saved; exit 75' TERM\n"
    'printf "%s\\n" "$@"\n'
    "touch started\n"
    "for ((i = 0; i < 1000; i++)); do sleep 0.05; done\n"
  )
  (bin_folder / "python").chmod(0o755)

  def tpu_vm(*arguments):
    named = dict(TPU="mine", ZONE="there")
    return run("tpu_vm.sh", *arguments, programs={"gcloud": GCLOUD}, **named)

  def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.02)

  log = tmp_path / "bigtrain" / "run.log"
  code, output, _ = tpu_vm("run", *FLAGS)
  assert code == 0, output
  until((tmp_path / "bigtrain" / "started").exists)
  supervisor = ["-m", "bigtrain.tools.supervise", "--when_preempted=end"]
  main = ["bigtrain.main", "--config=x.py", "--workdir=a folder"]
  words = [*supervisor, "--", ".venv/bin/python", "-m", *main]
  assert log.read_text().splitlines() == words
  code, output, _ = tpu_vm("stop")
  assert code == 0, output
  until(lambda: log.read_text().endswith("saved\n"))


def test_kubernetes_names_hosts_consistently():
  text = (LAUNCH / "kubernetes.yaml").read_text()
  job_set = yaml.safe_load(text)
  (replicated,) = job_set["spec"]["replicatedJobs"]
  job = replicated["template"]["spec"]
  (container,) = job["template"]["spec"]["containers"]
  words = iter(container["command"])
  assert [next(words) for _ in range(3)] == ["python", "-m", "bigtrain.main"]
  flags = dict(word.removeprefix("--").split("=", 1) for word in words)
  assert job["completions"] == job["parallelism"] == int(flags["num_processes"])
  assert text.count("# CHANGE: hosts") == 3
  # The name of a pod is JOBSET-JOB-INDEX-POD, in the domain of the JobSet.
  name = job_set["metadata"]["name"]
  host = f"{name}-{replicated['name']}-0-0.{name}"
  port = container["ports"][0]["containerPort"]
  assert flags["coordinator"] == f"{host}:{port}"
  assert (LAUNCH.parent / flags["config"]).exists()
  mounted = {mount["name"] for mount in container["volumeMounts"]}
  assert mounted == {v["name"] for v in job["template"]["spec"]["volumes"]}
  # Only exit code 2 ends the JobSet.
  (policy,) = job["podFailurePolicy"]["rules"]
  assert policy["onExitCodes"]["values"] == [2]
  (rule,) = job_set["spec"]["failurePolicy"]["rules"]
  assert rule["action"] == "FailJobSet"
