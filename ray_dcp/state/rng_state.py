"""``RNGState``: the random state of every rank."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ray_dcp.errors import StateDictError
from ray_dcp.planning.per_rank import PerRank

_WORDS = "<625I"
"""Layout of the 624 words of the Mersenne Twister and the place in them."""


class RNGState:
    """The random state of this rank: Python's ``random``, numpy's global one, torch's on the CPU and every CUDA device.

    A ``Stateful``. ``generators`` are ``torch.Generator``s of your own, by name, saved with the rest. A load on as many
    ranks as saved gives each rank its own state back, with all its parts as they were together. On another number of
    ranks every rank is seeded anew, by a digest of the states of all saving ranks, its rank and the number of ranks:
    ranks have states that differ, two loads of one checkpoint give the same states, and no rank has parts of several
    saved ones. A CUDA device or generator that the saving rank did not have is seeded anew too. States of devices that
    are not there now are left out.

    Loading reads numbers and bytes and runs no code.
    """

    def __init__(self, **generators: torch.Generator) -> None:
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        return {"rng": PerRank(self._captured(), reshard=_seed_of_another_size)}

    def problems_with(self, values: Mapping[str, Any]) -> list[str]:
        """A line for each stored state that this process cannot take: another numpy, torch or generator saved it."""
        found: dict[str, None] = {}
        for kept in values.values():
            held = kept[0] if isinstance(kept, tuple) and len(kept) == 1 else kept
            if isinstance(held, dict) and "seed" not in held:
                found |= dict.fromkeys(_host_problems(held))
        return list(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        held: dict[str, Any] = state_dict["rng"].value
        seed = held.get("seed")
        if seed is None:
            _restore_host(held)
            seed = _digest([held])  # for what has no saved state, and only for that
        else:
            _seed_all(seed)
        _restore_cuda(held.get("cuda", []), seed)
        for name, generator in self._generators.items():
            content = held.get("generators", {}).get(name)
            if content is not None and len(content) == generator.get_state().numel():
                generator.set_state(_state(content))
            else:
                generator.manual_seed(_derived(seed, f"generator {name}"))

    def _captured(self) -> dict[str, Any]:
        version, words, gauss_next = random.getstate()
        legacy: Any = np.random.get_state(legacy=True)
        if isinstance(legacy, dict):
            raise StateDictError(f"numpy's global generator is a {legacy['bit_generator']}; only MT19937 can be saved")
        algorithm, keys, place, has_gauss, gauss = legacy
        return {
            "python": (version, struct.pack(_WORDS, *words), gauss_next),
            "numpy": (str(algorithm), struct.pack(_WORDS, *map(int, keys), int(place)), int(has_gauss), float(gauss)),
            "torch": _content(torch.default_generator),
            "cuda": [_content(generator) for generator in _cuda_generators()],
            "generators": {name: _content(generator) for name, generator in self._generators.items()},
        }


def _cuda_generators() -> Sequence[torch.Generator]:
    """The default generators of the CUDA devices; none before the process uses CUDA, as asking would take memory."""
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _content(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _restore_host(held: dict[str, Any]) -> None:
    version, words, gauss_next = held["python"]
    random.setstate((version, struct.unpack(_WORDS, words), gauss_next))
    algorithm, words, has_gauss, gauss = held["numpy"]
    *keys, place = struct.unpack(_WORDS, words)
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    torch.default_generator.set_state(_state(held["torch"]))


def _host_problems(held: dict[str, Any]) -> Iterator[str]:
    legacy: Any = np.random.get_state(legacy=True)
    if isinstance(legacy, dict):
        yield f"numpy's global generator is a {legacy['bit_generator']}; the checkpoint has the state of another"
    elif "numpy" in held and held["numpy"][0] != legacy[0]:
        yield f"the checkpoint has the state of numpy's {held['numpy'][0]}, this process has {legacy[0]}"
    wanted = torch.default_generator.get_state().numel()
    if "torch" in held and len(held["torch"]) != wanted:
        yield f"the checkpoint's state of torch's generator has {len(held['torch'])} bytes, this torch's {wanted}"


def _restore_cuda(devices: Sequence[bytes], seed: int) -> None:
    for device, content in enumerate(devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_state(content), device)  # torch defers this until CUDA is used
    for device, generator in enumerate(_cuda_generators()):
        if device >= len(devices):
            generator.manual_seed(_derived(seed, f"cuda {device}"))


def _seed_all(seed: int) -> None:
    random.seed(_derived(seed, "python"))
    np.random.seed(_derived(seed, "numpy") % 2**32)
    torch.manual_seed(_derived(seed, "torch"))  # of all devices, also of those not in use yet


def _seed_of_another_size(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    return {"seed": _derived(_digest(states), f"rank {rank} of {world_size}")}


def _digest(states: Iterable[dict[str, Any]]) -> int:
    digest = hashlib.sha256()
    for state in states:
        # Only what is the same on every machine: the states of devices depend on which devices are there.
        digest.update(repr((state["python"], state["numpy"], state["torch"])).encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def _derived(seed: int, name: str) -> int:
    """A seed that depends on ``seed`` and ``name``: a non-negative number below 2**63."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


__all__ = ["RNGState"]
