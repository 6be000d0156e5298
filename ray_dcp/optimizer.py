"""``torch.distributed.checkpoint.optimizer`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import optimizer
from torch.distributed.checkpoint.optimizer import *  # for type checkers, who do not see the next line

sys.modules[__name__] = optimizer
