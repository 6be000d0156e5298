"""``Turn``: a save's place behind the earlier ones of its rank that are still in flight.

Saves are planned and staged while earlier ones go on. But nobody hands over, or writes, a later one first: its commit
waits for the earlier one, whose rank or deputy must not be busy with the later one by then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Turn:
    """The turn of one save behind ``earlier`` ones of its rank. Its thread waits, and says what others wait for."""

    def __init__(self, earlier: Sequence[Turn] = (), *, uses: Sequence[object] = (), alone: bool = False) -> None:
        self.uses = tuple(uses)
        """Objects of the user's that are at work in it: no other save must touch them."""
        self.alone = alone
        """Whether no later save may begin beside it."""
        self._earlier = tuple(earlier)
        self._changed = threading.Condition()
        self._is_over = False
        self._is_with_deputy = False

    @property
    def may_hand_over(self) -> bool:
        """Whether each earlier save is over, or a deputy has it: a deputy has them in their order."""
        return all(one._is_over or one._is_with_deputy for one in self._earlier)

    def wait_to_hand_over(self) -> None:
        """Return when ``may_hand_over``; at the latest when the earlier saves are over."""
        while not self.may_hand_over:
            for one in self._earlier:
                one._wait_for_deputy_or_end()

    def wait_to_write(self) -> None:
        """Return when the earlier saves are over, and this rank may write this one, which no deputy has (any more)."""
        self._note(with_deputy=False)
        self.wait_to_commit()

    def wait_to_commit(self) -> None:
        """Return when the earlier saves are over: who commits by itself, with nobody else to keep the order, waits."""
        for one in self._earlier:
            one._wait_for_end()

    def handed_over(self) -> None:
        """Note that a deputy has this save."""
        self._note(with_deputy=True)

    def end(self) -> None:
        """Note that this save is over, however it has ended."""
        self._note(with_deputy=False, over=True)
        self._earlier = self.uses = ()

    def _note(self, *, with_deputy: bool, over: bool = False) -> None:
        with self._changed:
            self._is_with_deputy, self._is_over = with_deputy, self._is_over or over
            self._changed.notify_all()

    def _wait_for_deputy_or_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_with_deputy)

    def _wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over)


__all__ = ["Turn"]
