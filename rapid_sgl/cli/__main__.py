"""``python -m rapid_sgl.cli``: the ``rapid-sgl`` command of this interpreter."""

import sys

from rapid_sgl.cli import main

sys.exit(main())
