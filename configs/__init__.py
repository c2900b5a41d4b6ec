"""Experiments, one config file each; start with digits.py.

`python -m bigtrain.main --config=configs/x.py:arguments` calls `get_config` of
a file. Each file opens with its command, hardware, expected result and source.
Configs import `configs.common`, which parses the arguments. decoder_lm.py,
t5_c4.py and cappa.py hold what several files share. Nothing else imports
configs.
"""
