"""Services of the running loop: programs, phases, hooks, memory, debugging.

  programs.py        compiles the update and the evaluations ahead of time, and
                     records what each program costs; open it first
  compiler_options.py, device_memory.py   are for it: options of XLA, and errors
                     about memory
  run.py             what the parts of a run share
  phases.py          reports the phases of the loop
  metrics_log.py     passes metrics to writers and hooks
  hooks.py           calls the hooks of the config; hook_context.py is what they
                     see of the run
  interactive.py     Ctrl-C and messages in notebooks
  no_workdir.py      runs that keep no files
  jax_flags.py       flags of jax and absl
  host_memory.py     settings of malloc
  debugging.py       logged shapes, and guarded transfers

main, command, hooks and tools import this package.
"""
