"""``python -m megaresume`` is the program ``megaresume``."""

import sys

from megaresume.program import main

sys.exit(main())
