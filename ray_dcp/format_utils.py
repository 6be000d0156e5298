"""``torch.distributed.checkpoint.format_utils`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.format_utils import *  # for type checkers, who do not see the next line

sys.modules[__name__] = format_utils
