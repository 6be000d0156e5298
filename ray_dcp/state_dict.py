"""``torch.distributed.checkpoint.state_dict`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import *  # for type checkers, who do not see the next line

sys.modules[__name__] = state_dict
