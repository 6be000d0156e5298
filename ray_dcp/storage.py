"""``torch.distributed.checkpoint.storage`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.storage import *  # for type checkers, who do not see the next line

sys.modules[__name__] = storage
