"""Plain values and containers of Python and numpy: they come back, no pickle runs code through them, and what will not
come back is told of when it is saved."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import logging
import operator
import os
import pathlib
import pickle
import random
import time
import types
import uuid
import zipfile
import zoneinfo

import numpy as np
import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.format.safe_pickle import plain_values, value_unpickler
from ray_dcp.format.zip_record import frame_pickle
from ray_dcp.planning.values import foreign_classes
from ray_dcp.planning.values.python_record import python_record
from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

STRUCTURED = np.array(
    [(1, (0.5, 1.5), "abc"), (2, (2.5, 3.5), "d")], dtype=[("a", "i4"), ("b", "f8", (2,)), ("c", "U3")]
)
UTC = datetime.timezone.utc
VALUES = {
    "frozenset": frozenset([1, "a"]),
    "deque": collections.deque([1, [2]], 3),
    "deque without end": collections.deque([1]),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "defaultdict of None": collections.defaultdict(None, a=[1]),
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "counter": collections.Counter("aab"),
    "date": datetime.date(2020, 1, 2),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
    "datetime of a zone": datetime.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "datetime of UTC": datetime.datetime(2020, 1, 2, tzinfo=UTC),
    "time": datetime.time(1, 2, 3, 4, tzinfo=UTC),
    "timedelta": datetime.timedelta(1, 2, 3),
    "timezone": datetime.timezone(datetime.timedelta(hours=2), "x"),
    "zone": zoneinfo.ZoneInfo("America/Argentina/Buenos_Aires"),
    "path": pathlib.Path("/a/b"),
    "relative path": pathlib.PurePosixPath("a"),
    "empty path": pathlib.Path(),
    "windows path": pathlib.PureWindowsPath("c:\\a"),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(-1, 3),
    "uuid": uuid.UUID(int=5),
    "safe uuid": uuid.UUID(int=5, is_safe=uuid.SafeUUID.safe),
    "range": range(1, 10, 2),
    "slice": slice(1, None, 2),
    "namespace": types.SimpleNamespace(a=1, b=[2]),
    "bytes io": io.BytesIO(b"abc\xff"),
    "string io": io.StringIO("x\ny"),
    "large number": 1 << 3000,
    "large numbers": [1 << 3000, -(1 << 5000)],
    "bytes": [b"", b"a\xff", bytes(range(256))],
    "no bytes": b"",
    "bytearray": [bytearray(), bytearray(b"a\xff")],
    "complex": 1 + 2j,
    "array": array.array("d", [1.5]),
    "empty array": array.array("b"),
    "addresses": [ipaddress.ip_address("1.2.3.4"), ipaddress.ip_network("fe80::/64"), ipaddress.ip_interface("::1/8")],
    "ellipsis": ...,
    "classes": [int, list, np.float32, torch.float32],
    "random": random.Random(3),
    "struct time": time.gmtime(0),
    "numpy texts": np.array(["a", "bc"]),
    "numpy bytes": np.array([b"a", b"\xff"]),
    "numpy objects": np.array([1, "x", None, {"a": frozenset([1])}], dtype=object),
    "numpy structured": STRUCTURED,
    "numpy structured objects": np.array([(1, "x"), (2, None)], dtype=[("a", ">i4"), ("o", "O")]),
    "numpy aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "numpy titles": np.zeros(2, np.dtype([(("title", "a"), "i4")])),
    "numpy dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "numpy date": np.datetime64("2020-01-01T00:00:01", "25us"),
    "numpy no date": np.datetime64("NaT"),
    "numpy difference": np.timedelta64(3, "s"),
    "numpy scalars": [
        np.float32(1.5),
        np.float16(1.5),
        np.bool_(True),
        np.int64(-1),
        np.complex64(1j),
        np.longdouble(1),
    ],
    "numpy text": np.str_("a"),
    "numpy no text": np.str_(""),
    "numpy void": np.void(b"abc"),
    "numpy row": STRUCTURED[0],
    "numpy dtypes": [np.dtype(">f4"), STRUCTURED.dtype, np.dtype(("i4", (2,))), np.dtype("O"), np.dtype("M8[ns]")],
    "numpy empty": np.zeros((0, 3)),
    "numpy empty texts": np.array([], dtype="U5"),
    "numpy empty objects": np.array([], dtype=object),
    "numpy without dimensions": np.array(5),
    "numpy fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "numpy state": np.random.RandomState(0).get_state(),
    "numpy new state": np.random.default_rng(0).bit_generator.state,
    "generator": torch.Generator().manual_seed(5),
    "with tensors": [torch.ones(2), collections.deque([torch.zeros(1)]), np.arange(3), frozenset(["a"])],
    "with a parameter": [torch.nn.Parameter(torch.ones(1)), frozenset()],
    "nested": {"a": (collections.deque([frozenset([uuid.UUID(int=1)])]), {decimal.Decimal(1): range(3)})},
}


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.flags.f_contiguous == b.flags.f_contiguous
        return alike and (a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes())
    if isinstance(a, torch.Tensor | torch.Generator):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else torch.equal(a.get_state(), b.get_state())
    if isinstance(a, io.BytesIO | io.StringIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return repr(a) == repr(b)


def decoded(record: bytes):
    return decode_python(io.BytesIO(record), file="f", fqn="x", trusted=False)


@pytest.mark.parametrize("kind", VALUES)
def test_a_plain_value_comes_back_whoever_saved_it_and_torch_reads_it(kind):
    value = VALUES[kind]
    foreign: set[str] = set()
    record = python_record(value, foreign)
    torchs = io.BytesIO()
    torch.save(value, torchs)
    assert same(decoded(record), value)
    assert same(decoded(torchs.getvalue()), value)
    assert same(torch.load(io.BytesIO(record), weights_only=False), value)
    assert not foreign


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_from_every_protocol(protocol):
    plain = {name: value for name, value in VALUES.items() if "tensor" not in name and "param" not in name}
    del plain["generator"], plain["classes"]
    for name, value in plain.items():
        try:
            program = pickle.dumps(value, protocol)
        except TypeError:
            assert protocol < 2
            continue
        if b"_reconstructor" in program or b"_frombuffer" in program:
            continue  # what protocols that torch does not write have of their own
        assert same(decoded(frame_pickle(program)), value), name


def test_all_of_it_goes_through_a_checkpoint_without_a_word(tmp_path, caplog):
    saved = {name: (value,) for name, value in VALUES.items()}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    filled = dict.fromkeys(saved)
    dcp.load(filled, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(same(filled[name], saved[name]) for name in saved)
    assert not caplog.records


class Color(enum.Enum):
    RED = 1


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Data:
    x: int


class Queue(collections.deque):
    pass


class Mine(dict):
    pass


def function() -> None: ...


USERS = {
    "Color": Color.RED,
    "Rights": Rights.READ | Rights.WRITE,
    "Point": Point(1, 2),
    "Data": Data(1),
    "Queue": Queue([1]),
    "Mine": Mine(a=1),
}


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(foreign_classes, "_told", set())
    caplog.set_level(logging.WARNING, logger="ray_dcp")
    return caplog


@pytest.mark.parametrize("around", [lambda x: x, lambda x: (x, torch.ones(1)), lambda x: frozenset([1]) and [(x,)]])
@pytest.mark.parametrize("kind", USERS)
def test_a_class_of_the_users_is_told_of_once_at_save_and_loads_once_it_is_allowed(tmp_path, told, kind, around):
    value = around(USERS[kind])
    if type(value) is Mine:
        pytest.skip("a mapping is walked")
    for number in range(2):
        dcp.save({"a": {"key": value, "n": 1}}, checkpoint_id=tmp_path / str(number), no_dist=True)
    (record,) = told.records
    message = record.getMessage()
    assert message.startswith("a.key")
    assert f"test_plain_values.{kind}" in message
    assert "torch.serialization.add_safe_globals" in message
    assert "trusted=True" in message
    filled = {"a": {"key": value if isinstance(value, list | dict) else None, "n": 0}}
    with pytest.raises(CheckpointException, match=kind) as caught:
        dcp.load(filled, checkpoint_id=tmp_path / "0", no_dist=True)
    assert isinstance(caught.value.__cause__, UnsafeDataError)
    with torch.serialization.safe_globals([type(USERS[kind])]):
        dcp.load(filled, checkpoint_id=tmp_path / "0", no_dist=True)
    assert same(filled["a"]["key"], value)


class RemembersNothing(set):
    """Of what was told: as many processes would, whose ranks are threads here."""

    def add(self, one): ...


def test_of_several_ranks_that_have_it_one_tells(tmp_path, told, monkeypatch):
    monkeypatch.setattr(foreign_classes, "_told", RemembersNothing())
    state = {"shared": (Color.RED,)}
    require_no_errors(ThreadRanks(3).save(lambda rank: state | {f"own{rank}": (Color.RED,)}, tmp_path / "c"))
    names = sorted(name for record in told.records for name in record.getMessage().partition(":")[0].split(", "))
    assert names == ["own0", "own1", "own2", "shared"]


@pytest.mark.parametrize("kind", USERS)
def test_what_the_user_has_allowed_already_is_not_told_of(tmp_path, told, kind):
    with torch.serialization.safe_globals([type(USERS[kind])]):
        dcp.save({"key": (USERS[kind],)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not told.records


@pytest.mark.parametrize(
    "value",
    [functools.partial(function), collections.defaultdict(function), function, Data, {"a": [os.path.join]}, Color],
    ids=["a partial", "a defaultdict", "a function", "a class", "a function in a list", "an enum"],
)
def test_functions_and_classes_are_told_of_and_refused(tmp_path, told, value):
    dcp.save({"key": (value,)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert told.records
    with pytest.raises(CheckpointException):
        dcp.load({"key": None}, checkpoint_id=tmp_path / "c", no_dist=True)


def test_a_member_of_an_allowed_enum_is_read_as_early_python_3_11_stored_it():
    program = pickle.dumps(Getattr(Color, "RED"), 2)
    with pytest.raises(UnsafeDataError):
        decoded(frame_pickle(program))
    with torch.serialization.safe_globals([Color]):
        assert decoded(frame_pickle(program)) is Color.RED
        for name in ("__class__", "mro", "__members__", "value"):
            with pytest.raises(UnsafeDataError):
                decoded(frame_pickle(pickle.dumps(Getattr(Color, name), 2)))


def test_flags_that_are_set_together_are_read_as_early_python_3_11_stored_them():
    program = pickle.dumps(Reduced(operator.or_, (Getattr(Rights, "READ"), Getattr(Rights, "WRITE"))), 2)
    with torch.serialization.safe_globals([Rights]):
        assert decoded(frame_pickle(program)) == Rights.READ | Rights.WRITE
    for operands in ((1, 2), ({1}, {2}), (Rights.READ, 1)):
        with pytest.raises(UnsafeDataError):
            decoded(frame_pickle(pickle.dumps(Reduced(operator.or_, operands), 2)))


class Getattr:
    def __init__(self, *arguments) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


class Reduced:
    """Pickles as whatever it was told to."""

    def __init__(self, *reduced) -> None:
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


class Touch:
    def __init__(self, marker) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


_reconstruct = np._core.multiarray._reconstruct
_NO_DTYPE = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
"""A dtype with objects in it that does not say so: numpy would take bytes for pointers."""


def planted(marker) -> dict[str, object]:
    touch = Touch(marker)
    array_of = (np.ndarray, (0,), b"b")
    return {
        "alone": touch,
        "in a frozenset": [Reduced(frozenset, ([touch],))],
        "in an object array": np.array([touch], dtype=object),
        "as a factory": Reduced(collections.defaultdict, (os.mkdir,)),
        "as a factory of Python's": Reduced(collections.defaultdict, (functools.partial(os.mkdir, str(marker)),)),
        "as a factory that imports": Reduced(collections.defaultdict, (__import__,)),
        "in a namespace": types.SimpleNamespace(a=touch),
        "as a method of a namespace": Reduced(types.SimpleNamespace, (), {"__reduce_ex__": 5}),
        "as a zone": Reduced(datetime.datetime, (b"\x07\xe4\x01\x01\x00\x00\x00\x00\x00\x00", touch)),
        "as a key": {Reduced(range, (touch,)): 1},
        "getattr of a class": Getattr(collections.deque, "append"),
        "getattr of a text": Getattr("text", "join"),
        "getattr of a plain class with underscores": Getattr(dict, "__init__"),
        "getattr nested": Getattr(Getattr(zoneinfo.ZoneInfo, "_unpickle"), "__call__"),
        "getattr of a zone's others": Getattr(zoneinfo.ZoneInfo, "from_file"),
        "getattr itself": [getattr],
        "a function among the values": [_reconstruct],
        "a dtype that lies": Reduced(np.dtype, ("V8", False, True), _NO_DTYPE),
        "a dtype of a class": Reduced(np.dtype, (Data, False, True)),
        "a dtype of a dict": Reduced(np.dtype, ({"names": ["a"], "formats": ["O"]},)),
        "a dtype's state without end": Reduced(np.dtype, ("V8", False, True), (3, "|", None, None, None, -5, 1, 0)),
        "an object array of bytes": Reduced(_reconstruct, array_of, (1, (1,), np.dtype("O"), False, b"\x01" * 8)),
        "an array that is too short": Reduced(_reconstruct, array_of, (1, (9,), np.dtype("f8"), False, b"\x01" * 8)),
        "an array of negative size": Reduced(_reconstruct, array_of, (1, (-1,), np.dtype("f8"), False, b"")),
        "an array of objects too few": Reduced(_reconstruct, array_of, (1, (5,), np.dtype("O"), False, [1])),
        "an array of another class": Reduced(_reconstruct, (np.matrix, (0,), b"b")),
        "an array with a size": Reduced(_reconstruct, (np.ndarray, (1 << 40,), b"b")),
        "a scalar of an object": Reduced(np._core.multiarray.scalar, (np.dtype("O"), pickle.dumps(touch))),
        "a scalar that is too short": Reduced(np._core.multiarray.scalar, (np.dtype("f8"), b"")),
        "a large number of digits": Reduced(fractions.Fraction, ("1e999999999",)),
        "a bytearray of a size": Reduced(range, (1.5,)),
        "a zone elsewhere": Reduced(zoneinfo.ZoneInfo, ("../../etc/passwd",)),
        "a state for a class": Reduced(collections.deque, ([],), {"x": 1}),
        "a state for a uuid": Reduced(uuid.UUID, (), {"int": touch}),
        "a state for a generator": Reduced(torch.Generator, (torch.device("cpu"),), (1, None, touch)),
        "torch's function that calls": Reduced(
            torch._tensor._rebuild_from_type_v2, (os.mkdir, dict, (str(marker),), {})
        ),
        "torch's function that calls numpy's": Reduced(
            torch._tensor._rebuild_from_type_v2, (np.dtype, np.dtype, ("O",), {})
        ),
        "torch's function that makes": Reduced(torch._utils._rebuild_wrapper_subclass, (dict, 1, 1, 1, 1, 1, 1, 1)),
        "a call of a value": Reduced(Reduced(slice, (1,)), (1,)),
    }


NAMES = [*planted("")]
PREFIXED = b"cos\nmkdir\nV%s\n\x85R0"


def program_of(value: object, protocol: int) -> bytes:
    """``value`` pickled; callables that pickle itself refuses to call are put there all the same."""
    buffer = io.BytesIO()

    class Careless(pickle._Pickler):
        def save_reduce(self, func, args, *rest, obj=None, **more):
            state = rest[0] if rest else more.get("state")
            self.save(func)
            self.save(args)
            self.write(pickle.REDUCE)
            if state is not None:
                self.save(state)
                self.write(pickle.BUILD)

    Careless(buffer, protocol).dump(value)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("with_tensor", [False, True])
@pytest.mark.parametrize("how", NAMES)
def test_no_pickle_runs_code_or_makes_what_numpy_would_trust(tmp_path, how, protocol, with_tensor):
    marker = tmp_path / "went_off"
    program = program_of(planted(marker)[how], protocol)
    record = frame_pickle(program)
    if with_tensor:
        source, target = zipfile.ZipFile(io.BytesIO(python_record([torch.ones(1)]))), io.BytesIO()
        with zipfile.ZipFile(target, "w") as made:
            for entry in source.infolist():
                made.writestr(entry.filename, program if entry.filename.endswith("data.pkl") else source.read(entry))
        record = target.getvalue()
    with pytest.raises((UnsafeDataError, CorruptCheckpointError)):
        decoded(record)
    assert not marker.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nmkdir\n.",
        b"(V%b\nios\nmkdir\n.",
        b"\x82\x01.",
        b"Pos.mkdir\n.",
        b"Vx\nQ.",
        b"ctypes\nSimpleNamespace\n)R(V__class__\nN\x8c\x01b\x85db.",
        b"ccollections\ndeque\n)R(V__class__\nNdb.",
        b"cbuiltins\nlist\n)R.",
        b"cbuiltins\nobject\n)\x81.",
        b"cbuiltins\nint\n)\x81.",
        b"cbuiltins\nint\n}Vx\nNsb.",
        b"ccollections\nOrderedDict\n}Vx\nNsb.",
        b"c_codecs\nencode\n}Vx\nNsb.",
        b"c_codecs\nencode\n(Vx\nVutf-8\ntR.",
        b"(Vx\nc_codecs\nencode\no.",
        b"c_codecs\nencode\nVx\n\x85\x81.",
        b"ctorch\ndevice\n}Vx\nNsb.",
        b"cbuiltins\nset\n)R(K\x01e.",
        b"cbuiltins\nbytearray\n)R(K\x01e.",
        b"cuuid\nUUID\n)\x81(K\x01e.",
        b"\x96\x00\x00\x00\x00\x04\x00\x00\x00.",
        b"\x8c\x02os\x8c\x05mkdir\x93.",
        b"\x8c\x0bcollections\x8c\x0cdeque.append\x93.",
        b"N\x85R.",
        b"]\x85R.",
        b"0.",
        b"e.",
        b"K\x01s.",
    ],
    ids=repr,
)
def test_programs_by_hand_are_refused(program, tmp_path, monkeypatch):
    import copyreg

    monkeypatch.setitem(copyreg._inverted_registry, 1, ("os", "mkdir"))
    monkeypatch.setitem(copyreg._extension_cache, 1, os.mkdir)
    marker = tmp_path / "went_off"
    program = program.replace(b"%b", str(marker).encode())
    with pytest.raises((UnsafeDataError, CorruptCheckpointError)):
        decoded(frame_pickle(b"\x80\x02" + program))
    assert not marker.exists()
    with pytest.raises((pickle.UnpicklingError, LookupError, TypeError, AttributeError, ValueError, EOFError)):
        value_unpickler.load(io.BytesIO(b"\x80\x02" + program))
    assert not marker.exists()


@pytest.mark.parametrize("ending", [b")R.", b")\x81.", b"}b.", b"K\x01a0(K\x01u."], ids=repr)
def test_what_a_refusal_tells_of_is_not_spelled_out(ending):
    """Lists of lists, each twice in the next: their text would take 2**60 bytes."""
    lists = b"]\x94" + b"".join(b"]\x94(h%ch%ce" % (number, number) for number in range(60))
    started = time.monotonic()
    with pytest.raises(UnsafeDataError):
        decoded(frame_pickle(b"\x80\x04" + lists + ending))
    assert time.monotonic() - started < within(5)


def test_a_function_among_the_values_is_refused_although_a_pickle_may_call_it():
    for program in (b"\x80\x02]c_codecs\nencode\na.", b"\x80\x02c_codecs\nencode\nq\x000h\x00\x85."):
        with pytest.raises(pickle.UnpicklingError, match="a function is among the values"):
            value_unpickler.load(io.BytesIO(program))


def test_reading_leaves_the_allow_list_and_numpys_own_dtypes_as_they_were():
    before = torch.serialization.get_safe_globals()
    kept = np.dtype("i8"), np.dtype("O"), np.dtype("V8"), np.dtype("M8")
    states = [one.__reduce__()[2] for one in kept]
    for name in ("numpy structured", "numpy objects", "numpy dates", "numpy dtypes", "deque"):
        decoded(python_record(VALUES[name]))
    decoded(frame_pickle(pickle.dumps(np.dtype(">i8"), 2)))
    assert torch.serialization.get_safe_globals() == before
    assert [one.__reduce__()[2] for one in kept] == states


def test_every_plain_class_that_may_be_called_is_there_with_a_check():
    assert set(plain_values.CALLS) <= {*plain_values.CLASSES.values()}
    assert set(plain_values.FACTORIES) <= {*plain_values.CLASSES.values()}
