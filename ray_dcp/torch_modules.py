"""Submodules of ``torch.distributed.checkpoint`` under ray_dcp's name, where ray_dcp has none of that name.

Those that torch documents have a small file here, which type checkers see. The others are found by this finder, so that
a program whose imports were changed finds whatever it imported from torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OURS = "ray_dcp."
_TORCHS = "torch.distributed.checkpoint."


class _TorchModules(MetaPathFinder, Loader):
    """Gives torch's own modules, never a second copy of one: each class in them stays one class."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_OURS):
            return None
        top = ".".join(fullname.split(".")[:2])
        if PathFinder.find_spec(top, sys.modules["ray_dcp"].__path__) is not None:
            return None
        try:
            found = importlib.util.find_spec(_in_torch(fullname))
        except ModuleNotFoundError:
            return None
        return None if found is None else ModuleSpec(fullname, self, is_package=bool(found.submodule_search_locations))

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Not from create_module: the import system would write into torch's module that it is called otherwise.
        sys.modules[module.__name__] = importlib.import_module(_in_torch(module.__name__))


def _in_torch(fullname: str) -> str:
    return _TORCHS + fullname.removeprefix(_OURS)


def find_torch_modules() -> None:
    """Let ``import ray_dcp.X`` find torch's module ``X``, from now on, where ray_dcp has no module ``X``."""
    # In front, since torch's packages have a __path__ of their own, from which others would load a second copy.
    if not any(isinstance(finder, _TorchModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchModules())
