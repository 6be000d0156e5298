import math
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.planning.disjoint import overlapping

BOXES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)).map(
        lambda box: (box[:2], box[2:])
    ),
    max_size=6,
)


def elements(box):
    (x, y), (height, width) = box
    return {(row, column) for row in range(x, x + height) for column in range(y, y + width)}


@given(BOXES)
def test_overlaps_are_found_wherever_they_are(boxes):
    expected = {
        pair for pair in combinations(range(len(boxes)), 2) if elements(boxes[pair[0]]) & elements(boxes[pair[1]])
    }
    assert {tuple(sorted(pair)) for pair in overlapping(boxes)} == expected


def test_boxes_without_dimensions_are_all_in_one_place():
    assert list(overlapping([((), ()), ((), ())])) == [(0, 1)]
    assert list(overlapping([((), ())])) == []


class Counted(int):
    looks = 0

    def __add__(self, other):
        Counted.looks += 1
        return int(self) + other


def test_boxes_of_a_usual_sharding_are_looked_at_a_few_times_each():
    numbers = range(2000)
    boxes = [((Counted(4 * number), Counted(0)), (4, 8)) for number in numbers]
    assert list(overlapping(boxes)) == []
    assert Counted.looks <= 4 * len(numbers) < math.comb(len(numbers), 2)
