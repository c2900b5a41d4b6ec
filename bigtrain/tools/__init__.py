"""Command-line tools: `python -m bigtrain.tools.NAME --help` explains each.

Each tool is one module or package with a `main`. overview and reference are
`python -m bigtrain`; checkpoint_export and checkpoint_import belong to
checkpoint; arguments, exits and ranking to several tools. Tools may import
everything except configs; only `python -m bigtrain` imports them.
"""
