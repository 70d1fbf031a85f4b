"""Pages about runs.

page.py       style, tables, figures: what every page is made of
"""
