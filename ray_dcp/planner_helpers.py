"""``torch.distributed.checkpoint.planner_helpers`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.planner_helpers import *  # for type checkers, who do not see the next line

sys.modules[__name__] = planner_helpers
