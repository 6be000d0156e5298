"""``torch.distributed.checkpoint.planner`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.planner import *  # for type checkers, who do not see the next line

sys.modules[__name__] = planner
