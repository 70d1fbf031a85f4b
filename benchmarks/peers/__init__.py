"""What loaders lose when a run is killed and resumed: each one, measured in the same way (``make peers``).

    __main__.py  python -m benchmarks.peers: runs all; writes docs/peers.json, and the tables in docs and README
    scenario.py  the run, and what changes between its kill and its resume
    tools/       the loaders, a file each
    worker.py    one rank of a run, and the loop that all loaders share
    launch.py    starts the ranks and kills them
    recorder.py  what was trained, counted apart from the loaders
    measure.py   the runs of one tool
    page.py      the tables
    picture.py   python -m benchmarks.peers.picture: docs/killed-three-times.svg
    drawing.py   that picture as SVG

The requirements of some tools contradict those of others, so there are two environments: requirements-*.txt.
"""
