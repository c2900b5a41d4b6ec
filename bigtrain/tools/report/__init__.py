"""Makes an HTML page with the curves and numbers of one or several runs.

report.py is the command: it reads workdirs and writes the files. page.py builds
the HTML, panels.py decides what to draw, and curves.py draws it with
matplotlib. Nothing outside of this package imports it.
"""
