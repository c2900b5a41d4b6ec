"""The processes of a run: signals, the channel, launchers, watchdog, lease.

Other packages import process.py (open it first), watchdog.py, lease.py and
transfers.py only. Behind process.py launchers.py detects the job, and
channel.py with hub.py, its end on process 0, carries all messages.
"""
