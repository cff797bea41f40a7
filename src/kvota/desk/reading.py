"""Prompts in the engine that have no first token yet, and how long a further one would take.

Short prompts are read in the order of their grants, and a long one beside them within a share of
its own; so a ticket waits for what its own lane has before it. What is known of the lane's first
tokens (`first_token.py`) turns those tokens into seconds.
"""

from collections.abc import Iterable

from kvota.desk.entry import Entry
from kvota.desk.first_token import FirstTokens
from kvota.desk.ticket import Lane, Stage


class Reading:
    """Hears of each lease when it begins and when its first token comes or it is stopped."""

    def __init__(self) -> None:
        self._tokens = dict.fromkeys(Lane, 0)  # of prompts being read
        self._times = {lane: FirstTokens() for lane in Lane}

    def num_before(self, entry: Entry) -> int:
        """Tokens that are read before those of a ticket that would be granted now."""
        return self._tokens[entry.lane]

    def begin(self, entry: Entry) -> None:
        """It has been granted; a paused one reads again what it had produced."""
        own = entry.unread_tokens
        entry.reads_tokens = own
        entry.reads_until = self._tokens[entry.lane] + own
        self._tokens[entry.lane] += own

    def end(self, entry: Entry, now: float, *, has_token: bool) -> None:
        """Its first token since the grant is there; or there will be none. Idempotent."""
        if entry.reads_tokens is None:
            return
        assert entry.granted_s is not None
        self._tokens[entry.lane] -= entry.reads_tokens
        entry.reads_tokens = None
        if entry.num_pauses:
            return  # what it finds in the prefix cache is nobody's guess
        learn = self._times[entry.lane].came if has_token else self._times[entry.lane].was_cut
        learn(entry.reads_until, now - entry.granted_s)

    def bound_s(self, entry: Entry) -> float:
        """Seconds from a grant to its first token that most such tickets keep within."""
        tokens = self._tokens[entry.lane] + entry.unread_tokens
        return self._times[entry.lane].bound_s(tokens)

    def fastest_s(self, entry: Entry) -> float:
        """The same at the best speed seen.

        With nothing before it a ticket is held to this alone: only who is let in can show that the
        engine has become faster again.
        """
        return self._times[entry.lane].fastest_s(entry.unread_tokens)

    def check(self, holders: Iterable[Entry]) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        found = dict.fromkeys(Lane, 0)
        for entry in holders:
            assert entry.stage is Stage.GRANTED or entry.reads_tokens is None
            found[entry.lane] += entry.reads_tokens or 0
        assert found == self._tokens, "prompts that are being read are miscounted"
