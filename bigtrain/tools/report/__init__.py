"""Makes an HTML page with the curves and numbers of one or several runs.

report.py is the command: it reads workdirs and writes the files. page.py builds
the HTML from sections: charts.py, with panels.py, which chooses the curves, and
page.js, which draws them; predictions.py, texts.py and logged_media.py, for
what evaluators have written or returned. A section of a run is a function in
page.py's list. curves.py draws the images with matplotlib.
"""
