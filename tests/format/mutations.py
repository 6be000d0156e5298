"""Files as damage or malice may leave them."""

from __future__ import annotations

import pickle
import struct
from typing import Any

from hypothesis import strategies as st

_ODD_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


@st.composite
def mutated(draw: Any, content: bytes) -> bytes:
    """``content`` after one change or a few: of bytes, of numbers, of runs of bytes, of its end."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "set", "number", "insert", "remove", "repeat", "move", "cut", "append"]))
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 30, 200]))
        if kind == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and changed:
            changed[at] = draw(st.integers(0, 255))
        elif kind == "number":
            number, width = draw(st.sampled_from(_ODD_NUMBERS)), draw(st.sampled_from([2, 4, 8]))
            changed[at : at + width] = struct.pack("<Q", number)[:width]
        elif kind == "insert":
            changed[at:at] = draw(st.binary(max_size=length))
        elif kind == "remove":
            del changed[at : at + length]
        elif kind == "repeat":
            changed[at:at] = changed[at : at + length]
        elif kind == "move":
            part = changed[at : at + length]
            to = draw(st.integers(0, max(0, len(changed) - 1)))
            changed[to : to + len(part)] = part
        elif kind == "cut":
            del changed[at:]
        else:
            changed += draw(st.binary(max_size=length))
    return bytes(changed)


_ALLOWED = (
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
    b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
    b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
    b"ctorch\nSize\n",
    b"ctorch\nfloat32\n",
    b"ctorch.serialization\n_get_layout\n",
    b"ccollections\nOrderedDict\n",
    b"cbuiltins\nset\n",
    b"cbuiltins\ncomplex\n",
    b"cpathlib\nPosixPath\n",
)
_FORBIDDEN = (
    b"cos\nmkdir\n",
    b"cposix\nmkdir\n",
    b"cbuiltins\neval\n",
    b"cbuiltins\ngetattr\n",
    b"cpathlib\nos.mkdir\n",
)
_OPCODES = tuple(one for name in pickle.__all__ if isinstance(one := getattr(pickle, name), bytes) and len(one) == 1)


@st.composite
def programs(draw: Any, marker: str) -> bytes:
    """Pickles of any opcodes, with what it takes to make a folder ``marker`` among their words."""
    text = marker.encode()
    call = b"(" + pickle.BINUNICODE + struct.pack("<I", len(text)) + text + b"tR"
    words = st.one_of(
        st.sampled_from(_OPCODES),
        st.sampled_from(_ALLOWED + _FORBIDDEN),
        st.sampled_from([call, b"iposix\nmkdir\n", b"(dp0\n", b"K\x05", b"\x8c\x02os", b"\x8c\x05mkdir\x93", b"N}tb"]),
        st.binary(max_size=3),
    )
    return b"".join(draw(st.lists(words, max_size=25))) + b"."
