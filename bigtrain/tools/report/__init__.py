"""Makes an HTML page with the curves and numbers of one or several runs.

report.py is the command and page.py builds the HTML, whose sections are
functions from a run to HTML, in page.py's list. panels.py chooses the curves;
charts.py and page.js draw them in the page, curves.py with matplotlib.
markup.py fills the templates, *.jinja; rows.jinja is the page of the tool rows.
"""
