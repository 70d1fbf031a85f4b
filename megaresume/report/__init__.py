"""Pages about runs.

page.py       style, tables, figures: what every page is made of
facts.py      what the ledger and the states of a run tell, as plain JSON
run_page.py   those facts as a page
"""
