"""Unpickles the plain values of Python and numpy, and tensors, without running what the pickle says.

Torch's restricted unpickler reads tensors and the plainest containers. This one reads all that ``plain_values`` lets
in, what torch lets in, and what the user allowed by ``torch.serialization.add_safe_globals``. It calls nothing else,
and puts states and items into nothing else. Torch takes this module for its ``pickle_module``.
"""

from __future__ import annotations

import _compat_pickle
import collections
import enum
import functools
import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

import torch

from ray_dcp.format.safe_pickle import plain_values
from ray_dcp.format.safe_pickle.metadata_rules import EnumMember, NotAllowedError, StandIns, as_named_now
from ray_dcp.format.safe_pickle.plain_arrays import RefusedValueError
from ray_dcp.torch_private import allowed_globals, blocklisted_modules, user_allowed_globals

_CALL_THEIR_FIRST = ("torch._tensor._rebuild_from_type_v2",)
"""Functions of torch's list that call what a file passes to them first."""
_CALL_A_CLASS = ("torch._utils._rebuild_wrapper_subclass",)


class Function:
    """Stands for a function in a pickle, which may call it and do nothing else with it."""

    __slots__ = ("__weakref__", "_call")
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("a state for a function")


_Base: Any = pickle._Unpickler
"""Pickle's Python half, whose stubs leave out most of it."""


class Unpickler(_Base):
    """One pickle, read once. Raises ``pickle.UnpicklingError`` naming what is not allowed."""

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        self._given = StandIns()
        self._users = user_allowed_globals()
        self._user_ids = {id(one) for one in self._users.values()}

    def load(self) -> Any:
        try:
            value = super().load()
        except RefusedValueError as error:
            raise pickle.UnpicklingError(str(error)) from error
        except NotAllowedError as error:
            raise pickle.UnpicklingError(f"GLOBAL {error} is not allowed here") from None
        for held in (self.memo, self.stack, *self.metastack):
            held.clear()
        try:
            self._given.require_gone("a function is among the values")
        except NotAllowedError as error:
            raise pickle.UnpicklingError(str(error)) from None
        return value

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < 3:
            renamed = (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), renamed)
        module, name = as_named_now(module, name)
        path = f"{module}.{name}"
        if path == "builtins.getattr":
            return self._given.give(EnumMember(self._members_of))
        if path == "_operator.or_":
            return self._given.give(Function(self._joined_flags))
        for allowed in (plain_values.CLASSES, plain_values.CONSTANTS):
            if path in allowed:
                return allowed[path]
        if path in plain_values.FUNCTIONS:
            return self._given.give(Function(plain_values.FUNCTIONS[path]))
        if path in allowed_globals():
            return self._torchs(path)
        if path in self._users and module not in blocklisted_modules:
            return self._users[path]
        raise pickle.UnpicklingError(f"GLOBAL {path} was not an allowed global")

    def _torchs(self, path: str) -> Any:
        found = allowed_globals()[path]
        if path in (*_CALL_THEIR_FIRST, *_CALL_A_CLASS):
            is_allowed = _is_torchs_own if path in _CALL_THEIR_FIRST else self._is_tensor_class
            return self._given.give(Function(functools.partial(_call_if, is_allowed, found)))
        return found

    def _is_tensor_class(self, one: Any) -> bool:
        return isinstance(one, type) and issubclass(one, torch.Tensor)

    def _members_of(self, owner: Any) -> Mapping[str, Any] | None:
        """What ``getattr`` may return: members of an enum that the user allowed, some methods of plain classes."""
        if isinstance(owner, enum.EnumMeta):
            return owner.__members__ if id(owner) in self._user_ids else None
        if not isinstance(owner, type):
            return None
        methods = {name: call for (cls, name), call in plain_values.METHODS.items() if cls is owner}
        return {name: self._given.give(Function(call)) for name, call in methods.items()}

    def _joined_flags(self, one: Any, other: Any) -> Any:
        """Flags that are set together, as early Python 3.11 stores them."""
        if not isinstance(one, enum.Flag) or id(type(one)) not in self._user_ids or type(other) not in (type(one), int):
            raise pickle.UnpicklingError("GLOBAL _operator.or_ is not allowed here")
        return one | other

    # The opcodes that call something or change what is there; each does as pickle's own, but looks at its values first.

    def _load_reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("a call without arguments")
        self.stack[-1] = self._call(called, arguments)

    def _call(self, called: Any, arguments: tuple[Any, ...]) -> Any:
        if type(called) in (Function, EnumMember):
            return called(*arguments)
        if id(called) in _plain_calls():
            return self._checked(called, _plain_calls()[id(called)], arguments)
        if id(called) in _torch_ids() or id(called) in self._user_ids:
            return called(*arguments)
        # Not its repr: a file of some hundred bytes can hold lists whose repr takes all memory there is.
        what = called.__qualname__ if isinstance(called, type) else f"a {type(called).__name__}"
        raise pickle.UnpicklingError(f"a call of {what} is not allowed")

    def _checked(self, called: Any, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return call(*arguments)
        except (RefusedValueError, TypeError) as error:
            raise pickle.UnpicklingError(f"{called.__name__}: {error}") from error

    def _load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not isinstance(cls, type):
            raise pickle.UnpicklingError("a new object of no class")
        if id(cls) in _plain_calls():
            made = self._checked(cls, _plain_calls()[id(cls)], arguments)
        elif cls is torch.nn.Parameter:
            made = torch.nn.Parameter(*arguments)
        elif id(cls) in _torch_ids() or id(cls) in self._user_ids:
            made = cls.__new__(cls, *arguments)
        else:
            raise pickle.UnpicklingError(f"a new object of {cls!r} is not allowed")
        self.append(made)

    def _load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) in plain_values.STATES:
            plain_values.STATES[type(made)](made, state)
        elif type(made) is torch.Tensor and type(state) is tuple:
            made.set_(*state)
        elif type(made) is torch.nn.Parameter:
            made.__setstate__(state)
        elif id(type(made)) in self._user_ids:
            self.stack.append(state)
            super().load_build()
        else:
            raise pickle.UnpicklingError(f"a state for a {type(made).__name__} is not allowed")

    def _into(self, container: Any, *allowed: type) -> None:
        if type(container) not in allowed and id(type(container)) not in self._user_ids:
            raise pickle.UnpicklingError(f"items for a {type(container).__name__} are not allowed")

    def _load_append(self) -> None:
        self._into(self.stack[-2], list, collections.deque)
        super().load_append()

    def _load_appends(self) -> None:
        self._into(self.metastack[-1][-1], list, collections.deque)
        super().load_appends()

    def _load_additems(self) -> None:
        self._into(self.metastack[-1][-1], set)
        super().load_additems()

    def _load_setitem(self) -> None:
        self._into(self.stack[-3], *_MAPPINGS)
        super().load_setitem()

    def _load_setitems(self) -> None:
        self._into(self.metastack[-1][-1], *_MAPPINGS)
        super().load_setitems()

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("something that lies beside the pickle, and is not there")

    def _load_binpersid(self) -> None:
        pid = self.stack[-1]
        if type(pid) is not tuple or len(pid) != 5 or pid[0] not in ("storage", b"storage") or type(pid[4]) is not int:
            raise pickle.UnpicklingError("something beside the pickle that is not the storage of a tensor")
        super().load_binpersid()

    def _load_bytearray8(self) -> None:
        """Load a bytearray; pickle's own makes room for as many bytes as it is told before it reads them."""
        nbytes = int.from_bytes(self.read(8), "little")
        content = self.read(nbytes) if nbytes < 1 << 62 else b""
        if len(content) != nbytes:
            raise EOFError("the pickle ends in a bytearray")
        self.append(bytearray(content))

    dispatch = {
        code[0]: _Base.dispatch[code[0]]
        for code in (
            pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP,
            pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2,
            pickle.LONG, pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT,
            pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES,
            pickle.BINBYTES8, pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
            pickle.TUPLE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
            pickle.LIST, pickle.EMPTY_LIST, pickle.DICT, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.FROZENSET,
            pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
            pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
        )
    } | {
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.BUILD[0]: _load_build,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.BINPERSID[0]: _load_binpersid,
        pickle.BYTEARRAY8[0]: _load_bytearray8,
    }  # fmt: skip


_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


@functools.cache
def _plain_calls() -> dict[int, Callable[..., Any]]:
    return {id(one): call for one, call in plain_values.CALLS.items()}


@functools.cache
def _torch_ids() -> frozenset[int]:
    """Ids of what a file may call of torch, apart from what ``plain_values`` has."""
    plain = {id(one) for one in plain_values.CLASSES.values()}
    own = {path: one for path, one in allowed_globals().items() if path not in plain_values.FUNCTIONS}
    return frozenset(id(one) for one in own.values()) - plain


def _is_torchs_own(one: Any) -> bool:
    return id(one) in _torch_ids()


def _call_if(is_allowed: Callable[[Any], bool], function: Callable[..., Any], *arguments: Any) -> Any:
    if not arguments or not is_allowed(arguments[0]):
        raise pickle.UnpicklingError("a function of torch's is passed what it must not call")
    return function(*arguments)


def load(file: IO[bytes], **options: Any) -> Any:
    """Unpickle one value, as ``pickle.load`` does. Raises ``pickle.UnpicklingError`` naming what is not allowed."""
    return Unpickler(file, **options).load()


__all__ = ["Unpickler", "load"]
