"""``torch.distributed.checkpoint.default_planner`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import *  # for type checkers, who do not see the next line

sys.modules[__name__] = default_planner
