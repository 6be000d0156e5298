"""``torch.distributed.checkpoint.stateful`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import stateful
from torch.distributed.checkpoint.stateful import *  # for type checkers, who do not see the next line

sys.modules[__name__] = stateful
