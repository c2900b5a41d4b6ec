"""Command-line tools: `python -m bigtrain.tools.NAME --help` explains each.

checkpoint shows, verifies, exports and imports checkpoints; evaluate, generate,
predict, report and runs work on finished or running runs and never write into
their files; plan estimates a config on many devices; supervise starts a run
again when it fails; replay computes steps of a run again and compares them;
sweep trains variants of a config; tokenize makes token files. Open the tool
that you run: each is one module or package with a `main`. overview and
reference are `python -m bigtrain`; checkpoint_export and checkpoint_import
belong to checkpoint; arguments, exits and ranking to several tools. Tools may
import everything except configs; only `python -m bigtrain` imports them.
"""
