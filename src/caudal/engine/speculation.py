"""Speculation: guess the next tokens of a sequence, run them in one step, and keep those that it would have got anyway.

Exact by construction. A step computes the last token of a sequence and k draft tokens after it, which gives k + 1
rows of logits. The sampler chooses a token from each row in turn, with the true history, as it would without
speculation; while the choice equals the draft, the next row is valid. A token is a function of the logits, the
parameters, the history, the seed and the position, and logits do not depend on the batch, so the output is the same,
token by token, sampled or greedy. Nothing has to be corrected, as in the rejection sampling of Leviathan et al. 2023.

What is left to decide is how much to guess, which `Speculator` does from measurements: how often drafts of the same
quality were right, and how long steps with more rows take. Where it does not pay, nothing is run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caudal.engine.sampling import SamplerRow

MAX_STEP_ROWS = 16  # of a step with drafts: beyond, computing counts and not reading the weights, so drafts cost
MIN_GAIN = 1.05  # tokens per second that drafts must promise, against none
PLAIN_EVERY = 48  # after so many steps with drafts comes one without, to measure it
ROW_COST = 0.2  # guess: what a row more adds to a step, as a share of the time of a step with one

# ------------------------------------------------------------------------------------------- prompt lookup

MAX_MATCH = 16  # tokens compared
MAX_CANDIDATES = 16  # earlier places compared

# The quality of a guess: how many tokens before it equal those before the place that it is copied from.
_LEVELS = (3, 4, 5, 6, 8, 12, 16)
LOOKUP_CHANCES = (0.35, 0.45, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)  # until there are measurements


class LookupIndex:
    """Finds the longest earlier occurrence of the latest tokens of a growing list.

    Hash chains, as in LZ77: every pair of adjacent tokens leads to the last place where it ended, and every place to
    the one before it. A new token costs O(1), a search compares at most MAX_CANDIDATES places.
    """

    def __init__(self, token_ids: list[int]) -> None:
        """The list may only grow; what is new is indexed by the next search."""
        self._token_ids = token_ids
        self._latest: dict[tuple[int, int], int] = {}  # pair -> where it ended last
        self._previous = array("q", [0])  # place -> where the pair that ends here ended before; 0: nowhere

    def find(self) -> tuple[int, int]:
        """(length, place): the longest match of at least two tokens, of equal ones the most recent, and the index of
        the token after it; (0, 0) if there is none."""
        ids, latest, previous = self._token_ids, self._latest, self._previous
        for place in range(len(previous), len(ids)):
            pair = ids[place - 1], ids[place]
            previous.append(latest.get(pair, 0))
            latest[pair] = place
        last = len(ids) - 1
        best = best_place = 0
        place = previous[last]
        for _ in range(MAX_CANDIDATES):
            if place == 0:
                break
            length = 2
            while length < MAX_MATCH and length <= place and ids[place - length] == ids[last - length]:
                length += 1
            if length > best:
                best, best_place = length, place + 1
                if best == MAX_MATCH:
                    break
            place = previous[place]
        return best, best_place

    def copy(self, place: int, count: int) -> list[int]:
        """What followed from `place` on; past the end of the list it repeats itself."""
        ids = self._token_ids
        found = ids[place : place + count]
        period = len(ids) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class Lookup:
    """Proposes what followed the latest tokens when they occurred before (prompt lookup: Saxena 2023)."""

    chances = LOOKUP_CHANCES
    seconds_per_token = 0.0  # a search takes microseconds
    free = True  # so drafts may be made without running them, to see whether they would have been right

    def levels(self, target: Speculation, limit: int) -> list[int]:
        """The quality of each token of the draft that `propose` would make, of at most `limit` tokens."""
        if target.lookup is None:
            target.lookup = LookupIndex(target.row.token_ids)
        length, target.place = target.lookup.find()
        if length == 0:
            return []
        return [bisect_right(_LEVELS, length + i) for i in range(limit)]

    def propose(self, wanted: Sequence[tuple[Speculation, int]]) -> list[list[int]]:
        """That many tokens for each."""
        return [t.lookup.copy(t.place, count) if t.lookup else [] for t, count in wanted]

    def forget(self, target: Speculation) -> None:
        """Free what is kept for a sequence that ended."""
        target.lookup = None


# ---------------------------------------------------------------------------------------------- decisions


class Chances:
    """How often draft tokens of each quality were right; recent ones count more."""

    _WEIGHT = 8.0  # observations that the prior counts for
    _MEMORY = 0.97  # what an observation still counts for after the next one of its level

    def __init__(self, prior: Chances | Sequence[float]) -> None:
        self._prior = prior
        num_levels = len(prior.right if isinstance(prior, Chances) else prior)
        self.right = [0.0] * num_levels
        self._seen = [0.0] * num_levels

    def __getitem__(self, level: int) -> float:
        """The probability that a draft token is right if those before it were."""
        return (self.right[level] + self._WEIGHT * self._prior[level]) / (self._seen[level] + self._WEIGHT)

    def observe(self, level: int, right: bool) -> None:
        self.right[level] = self.right[level] * self._MEMORY + right
        self._seen[level] = self._seen[level] * self._MEMORY + 1.0
        if isinstance(self._prior, Chances):
            self._prior.observe(level, right)

    def fade(self) -> None:
        """Forget a little, so that what was given up is tried again."""
        self.right = [x * 0.99 for x in self.right]
        self._seen = [x * 0.99 for x in self._seen]
        if isinstance(self._prior, Chances):
            self._prior.fade()


class StepCosts:
    """Seconds of a step with 1 .. MAX_STEP_ROWS rows, as measured lately. Sizes that have not been measured for a
    while drift towards a guess from those that have, so that no bad measurement is believed for ever."""

    _NEW = 0.3  # weight of a measurement against all before it
    _DRIFT = 0.005
    _MAX_RATIO = 2.0  # a measurement counts as at most that far from the expected: a step may have been interrupted

    def __init__(self) -> None:
        self._seconds: list[float] | None = None

    @property
    def known(self) -> bool:
        return self._seconds is not None

    def __getitem__(self, num_rows: int) -> float:
        assert self._seconds is not None
        return self._seconds[num_rows - 1]

    def record(self, num_rows: int, seconds: float) -> None:
        shape = [1.0 + ROW_COST * i for i in range(MAX_STEP_ROWS)]
        measured = num_rows - 1
        if self._seconds is None:
            self._seconds = [seconds * x / shape[measured] for x in shape]
            return
        old = self._seconds[measured]
        new = old + self._NEW * (min(max(seconds, old / self._MAX_RATIO), old * self._MAX_RATIO) - old)
        for i, value in enumerate(self._seconds):
            # A single row goes through other kernels and says little about more of them.
            related = i == measured or 0 not in (i, measured)
            weight = max(self._DRIFT, 0.5 ** abs(i - measured) * self._NEW if related else 0.0)
            self._seconds[i] = value + weight * (new * shape[i] / shape[measured] - value)
        self._seconds[measured] = new


@dataclass(slots=True, eq=False)
class Speculation:
    """What is kept for one sequence; compared by identity."""

    row: SamplerRow  # its history is what drafts continue
    chances: Chances
    guess: list[int] = field(default_factory=list[int])  # for the step in progress: a draft, and perhaps one token more
    levels: list[int] = field(default_factory=list[int])  # the quality of each token of the guess
    lookup: LookupIndex | None = None
    place: int = 0  # where the guess is copied from


class Proposer(Protocol):
    """Makes drafts."""

    @property
    def chances(self) -> Sequence[float]:
        """For each level of quality, how often a token is right, until there are measurements."""
        ...

    @property
    def seconds_per_token(self) -> float:
        """What a token more in the longest draft of a step costs, beside the step itself."""
        ...

    @property
    def free(self) -> bool:
        """Whether guesses cost nothing: then they are made even if they are not run, to see if they come true."""
        ...

    def levels(self, target: Speculation, limit: int) -> list[int]:
        """The quality of each token that `propose` could give, at most `limit` of them."""
        ...

    def propose(self, wanted: Sequence[tuple[Speculation, int]]) -> list[list[int]]:
        """At most that many tokens for each."""
        ...

    def forget(self, target: Speculation) -> None:
        """Free what is kept for a sequence that ended."""
        ...


class Speculator:
    """Decides how many draft tokens the sequences of a step get: as many as promise the most tokens per second."""

    def __init__(self, proposer: Proposer, max_tokens: int) -> None:
        """`max_tokens`: of one draft."""
        self._proposer = proposer
        self._max_tokens = max_tokens
        self._chances = Chances(proposer.chances)
        self._costs = StepCosts()
        self._num_since_plain = 0  # steps in a row with drafts

    def start(self, row: SamplerRow) -> Speculation:
        """Begin with a new sequence."""
        return Speculation(row, Chances(self._chances))

    def forget(self, target: Speculation) -> None:
        """The sequence ended."""
        self._proposer.forget(target)

    def draft(self, targets: Sequence[tuple[Speculation, int]], num_rows: int) -> list[list[int]]:
        """Drafts for sequences that will compute their last token in a step of `num_rows` tokens in all; with each, how
        many tokens its draft may have."""
        if not targets or num_rows >= MAX_STEP_ROWS or not self._costs.known:
            return [[]] * len(targets)
        for target, limit in targets:
            target.levels = self._proposer.levels(target, min(limit, self._max_tokens))
        counts = self._choose([target for target, _ in targets], num_rows)
        spare = int(self._proposer.free)
        wanted: list[tuple[Speculation, int]] = []
        for (target, _), count in zip(targets, counts, strict=True):
            target.levels = target.levels[: count + spare]
            if target.levels:
                wanted.append((target, len(target.levels)))
            elif not self._proposer.free:
                target.chances.fade()
        for (target, _), guess in zip(wanted, self._proposer.propose(wanted), strict=True):
            target.guess = guess
        return [target.guess[:count] for (target, _), count in zip(targets, counts, strict=True)]

    def observe(self, target: Speculation, token_ids: Sequence[int]) -> None:
        """The tokens that the sequence got from the step."""
        for level, guess, token_id in zip(target.levels, target.guess, token_ids, strict=False):
            target.chances.observe(level, guess == token_id)
            if guess != token_id:
                break
        target.guess, target.levels = [], []

    def record(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """The time of a step in which every sequence got tokens, without that for making the drafts."""
        self._num_since_plain = self._num_since_plain + 1 if num_drafted else 0
        if num_rows <= MAX_STEP_ROWS:
            self._costs.record(num_rows, seconds)

    def _choose(self, targets: Sequence[Speculation], num_rows: int) -> list[int]:
        """How many tokens of each possible draft to run."""
        counts = [0] * len(targets)
        if self._num_since_plain >= PLAIN_EVERY:
            return counts
        found: list[tuple[float, int, int]] = []  # minus the probability that it is accepted, place in draft, target
        for index, target in enumerate(targets):
            accepted = accumulate((target.chances[level] for level in target.levels), mul)
            found += [(-p, place, index) for place, p in enumerate(accepted)]
        found.sort()
        num_tokens = float(len(targets))
        best, best_count, longest = MIN_GAIN * num_tokens / self._costs[num_rows], 0, 0
        for count, (p, place, _) in enumerate(found[: MAX_STEP_ROWS - num_rows], 1):
            num_tokens -= p
            longest = max(longest, place + 1)
            rate = num_tokens / (self._costs[num_rows + count] + longest * self._proposer.seconds_per_token)
            if rate > best:
                best, best_count = rate, count
        for _, _, index in found[:best_count]:
            counts[index] += 1
        return counts
