"""Names of values: as torch gives them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ray_dcp.planning.values.flat import flat_state

WEIGHT = torch.ones(1)
KEYS = st.sampled_from(["a", "b", "c.d", 0, 1, -1, True, None, (1, 2), 0.5])
VALUES = st.recursive(
    st.sampled_from([WEIGHT, 1, None, "x", (1, {}), {1}, (WEIGHT,)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=2).map(lambda entries: defaultdict(list, entries))
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_a_flat_state_is_the_one_that_torch_makes(state):
    try:
        torchs, torchs_paths = flatten_state_dict(state)
        flat, paths = flat_state(state)
    except ValueError as error:
        with pytest.raises(ValueError, match=r"two values have one name|duplicated flatten key"):
            raise error
        with pytest.raises(ValueError, match="two values have one name"):
            flat_state(state)
        return
    assert list(flat) == list(torchs)
    assert all(flat[name] is torchs[name] for name in torchs)
    assert repr(paths) == repr(torchs_paths)
