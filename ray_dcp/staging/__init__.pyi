# What type checkers see of `__init__.py`, which imports torch's module only when one of its names is asked for.
from torch.distributed.checkpoint.staging import *
