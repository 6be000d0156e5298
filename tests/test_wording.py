"""A list in a message shows its first entries and counts the rest."""

import pytest

from ray_dcp.errors import JoinTimeoutError, RankLostError, StateDictError
from ray_dcp.protocol.exception import CheckpointException, RankFailure
from ray_dcp.protocol.rank.report import LoadReport
from ray_dcp.wording import cut, first_line_of, first_lines, format_seconds, joined, number_runs, ranks_text

NAMES = [f"model.layers.{number}.weight" for number in range(5000)]


def test_a_list_that_fits_is_there_as_a_whole():
    assert first_lines(["a", "b"]) == ["a", "b"]
    assert first_lines([]) == []
    assert joined("abc", most=3) == "a, b, c"
    assert joined("abcd", most=3) == "a, b, c, d"
    assert joined("abcde", most=3) == "a, b, c and 2 more"


def test_of_a_long_list_the_first_twenty_and_a_count_are_there():
    assert first_lines(NAMES, kept_in=".problems") == [*NAMES[:20], "and 4980 more: .problems has all"]


def test_one_endless_entry_does_not_fill_the_screen():
    text = "name" * 5000
    shown = cut(text)
    assert len(shown) < 700
    assert shown.startswith("namename")
    assert shown.endswith("namename")
    assert "19400 characters" in shown
    assert cut("short") == "short"


def test_numbers_are_shown_as_runs():
    assert number_runs([6, 0, 1, 2, 3, 3]) == "0-3, 6"
    assert number_runs([]) == ""
    assert number_runs(range(0, 10_000, 2)).endswith("38 and 4980 more")
    assert (ranks_text([3]), ranks_text([0, 1, 2])) == ("rank 3", "ranks 0-2")


def test_an_error_about_thousands_of_names_is_a_screen_long_and_keeps_them_all():
    error = StateDictError("does not fit", [f"{name}: not in the checkpoint" for name in NAMES])
    assert len(str(error)) < 2000
    assert str(error).endswith("\n  - and 4980 more: the error's .problems has all")
    assert len(error.problems) == 5000


def test_an_error_about_thousands_of_ranks_is_a_screen_long():
    failures = [RankFailure(rank, "write", "OSError", "disk full", "Traceback ...\n" * 20) for rank in range(2000)]
    error = CheckpointException("save", "/dir", failures)
    assert len(str(error)) < 5000
    assert "and 1979 more: .rank_failures has all" in str(error)
    assert error.failed_ranks == tuple(range(2000))
    lost = RankLostError(group="g", lost=dict.fromkeys(range(2000), "its node died"))
    assert len(str(lost)) < 1000
    assert len(lost.lost) == 2000
    late = JoinTimeoutError(group="g", world_size=4000, missing_ranks=range(1, 4000), timeout_s=60)
    assert "ranks 1-3999 of 4000" in str(late)


def test_a_load_report_prints_the_first_names_and_no_parameters_of_its_url():
    report = LoadReport("s3://b/x?endpoint_override=host:1", tuple(NAMES), ("only",), (), 10, 20)
    text = repr(report)
    assert len(text) < 1000
    assert text.startswith("LoadReport(checkpoint_id='s3://b/x', loaded=('model.layers.0.weight', 'model.layers.1.w")
    assert text.endswith(
        "'model.layers.19.weight', ... 4980 more), missing=('only',), unexpected=(), nbytes_read=10, nbytes_loaded=20)"
    )
    assert len(report.loaded) == 5000


def test_of_an_error_that_goes_on_for_pages_the_first_line_is_told():
    assert first_line_of(ValueError("\n  the node died \n" + "trace\n" * 1000)) == "the node died"
    assert first_line_of(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (1.5, "1.5 s"), (119, "119 s"), (450, "7.5 min"),
     (11135, "3.09 h"), (216000, "2.5 days"), (1.8244e8, "2112 days"), (float("inf"), "inf days")],
)  # fmt: skip
def test_a_time_has_the_unit_that_suits_it(seconds, text):
    assert format_seconds(seconds) == text
