"""``python -m megaresume`` is the program ``megaresume``."""

import sys

from megaresume.cli.main import main

sys.exit(main())
