"""``torch.distributed.checkpoint.filesystem`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import *  # for type checkers, who do not see the next line

sys.modules[__name__] = filesystem
