"""Services of the running loop: programs, phases, hooks, memory, debugging.

Open programs.py first: it compiles the update and the evaluations ahead of
time and records what each program costs. phases.py reports the loop's phases;
metrics_log.py passes metrics to writers and hooks; hooks.py calls the hooks of
the config, and hook_context.py is what they see of the run; interactive.py is
for notebooks; host_memory.py tunes malloc; debugging.py logs shapes;
jax_flags.py reads the flags of jax and absl.
main, command, hooks and tools import this package.
"""
