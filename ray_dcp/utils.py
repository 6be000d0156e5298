"""``torch.distributed.checkpoint.utils`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import utils
from torch.distributed.checkpoint.utils import *  # for type checkers, who do not see the next line

sys.modules[__name__] = utils
