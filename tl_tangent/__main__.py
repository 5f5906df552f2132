"""``python -m tl_tangent`` is the command ``tl-tangent``."""

import sys

from tl_tangent.cli import main

sys.exit(main())
