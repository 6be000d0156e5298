"""``torch.distributed.checkpoint.hf_storage`` under this package's name: one and the same module."""

import sys

from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.hf_storage import *  # for type checkers, who do not see the next line

sys.modules[__name__] = hf_storage
