"""``torch.distributed.checkpoint.metadata`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import *  # for type checkers, who do not see the next line

sys.modules[__name__] = metadata
