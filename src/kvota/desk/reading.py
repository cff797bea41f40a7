"""Prompts in the engine that have no first token yet, and how long a further one would take.

Short prompts are read in the order of their grants, and a long one beside them within a share of
its own; so a ticket waits for what its own lane has before it. What is known of the lane's first
tokens (`first_token.py`) turns those tokens into seconds.

Reading goes on while a ticket waits in line. So its first token is not its wait and then all that
is being read now, but the later of two, and then its own prompt:

    first token = max(wait for the grant, time to read all before it) + time to read its own
"""

from collections.abc import Iterable

from kvota.desk.entry import Entry
from kvota.desk.first_token import FirstTokens
from kvota.desk.ticket import Lane, Stage

_NEWEST = 0.02  # weight of the newest ticket in a sliding mean


class Reading:
    """Hears of each lease when it begins and when its first token comes or it is stopped."""

    def __init__(self) -> None:
        self._lanes = {lane: _LaneReading() for lane in Lane}

    def is_idle(self, entry: Entry) -> bool:
        """Nothing would be read before a ticket that would be granted now."""
        return not self._lanes[entry.lane].tokens_of

    def begin(self, entry: Entry, now: float) -> None:
        """It has been granted; a paused one reads again what it had produced."""
        lane, own = self._lanes[entry.lane], entry.unread_tokens
        entry.reads_tokens = own
        entry.reads_until = round(lane.tokens_left(now)) + own
        lane.begin(entry.id, own, now)

    def end(self, entry: Entry, now: float, *, has_token: bool) -> None:
        """Its first token since the grant is there; or there will be none. Idempotent."""
        if entry.reads_tokens is None:
            return
        assert entry.granted_s is not None
        lane = self._lanes[entry.lane]
        lane.end(entry.id, now)
        entry.reads_tokens = None
        if entry.num_pauses:
            return  # what it finds in the prefix cache is nobody's guess
        learn = lane.times.came if has_token else lane.times.was_cut
        learn(entry.reads_until, now - entry.granted_s, now)

    def bound_s(self, entry: Entry, now: float) -> float:
        """Seconds from a grant now to its first token that most such tickets keep within."""
        lane = self._lanes[entry.lane]
        return lane.times.bound_s(lane.tokens_left(now) + entry.unread_tokens)

    def is_within(self, entry: Entry, limit_s: float, now: float) -> bool:
        """Whether `bound_s` is at most `limit_s`; where that is plain, it is not worked out."""
        lane = self._lanes[entry.lane]
        tokens = lane.tokens_left(now) + entry.unread_tokens
        return lane.times.is_within(tokens, limit_s)

    def bound_in_line_s(self, entry: Entry, wait_s: float, num_before: int, now: float) -> float:
        """The same from now, for one that is granted after `wait_s` and `num_before` others."""
        lane, own = self._lanes[entry.lane], entry.unread_tokens
        before = lane.tokens_left(now) + num_before * lane.mean_tokens
        if lane.times.token_s * before > wait_s:
            return lane.times.bound_s(before + own)
        return wait_s + lane.times.bound_s(own)

    def begins_s(self, entry: Entry, wait_s: float, num_before: int, now: float) -> float:
        """Seconds from now until the engine begins with it, which most such tickets keep within."""
        lane = self._lanes[entry.lane]
        before = lane.tokens_left(now) + num_before * lane.mean_tokens
        return lane.times.bound_s(before) if lane.times.token_s * before > wait_s else wait_s

    def fastest_s(self, entry: Entry) -> float:
        """The same at the best speed seen.

        With nothing before it a ticket is held to this alone: only who is let in can show that the
        engine has become faster again.
        """
        return self._lanes[entry.lane].times.fastest_s(entry.unread_tokens)

    def check(self, holders: Iterable[Entry]) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        found: dict[Lane, dict[str, int]] = {lane: {} for lane in Lane}
        for entry in holders:
            assert entry.stage is Stage.GRANTED or entry.reads_tokens is None
            if entry.reads_tokens is not None:
                found[entry.lane][entry.id] = entry.reads_tokens
        for lane, reading in self._lanes.items():
            assert found[lane] == reading.tokens_of, "prompts that are being read are miscounted"


class _LaneReading:
    """The prompts of one lane, in the order in which they are read."""

    def __init__(self) -> None:
        self.times = FirstTokens()
        self.tokens_of: dict[str, int] = {}
        self.mean_tokens = 0.0  # of those that began lately
        self._tokens = 0
        self._since_s = 0.0  # the first of them is read from then on

    def begin(self, name: str, tokens: int, now: float) -> None:
        if not self.tokens_of:
            self._since_s = now
        newest = _NEWEST if self.mean_tokens else 1.0
        self.mean_tokens += newest * (tokens - self.mean_tokens)
        self.tokens_of[name] = tokens
        self._tokens += tokens

    def end(self, name: str, now: float) -> None:
        self._tokens -= self.tokens_of.pop(name)
        self._since_s = now

    def tokens_left(self, now: float) -> float:
        """Still to be read, if the first is read at the speed that is known."""
        if not self._tokens:
            return 0
        first = next(iter(self.tokens_of.values()))
        token_s = self.times.token_s
        read = (now - self._since_s) / token_s if token_s else 0.0
        return self._tokens - min(read, first)
