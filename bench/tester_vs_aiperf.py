"""Does kvota's tester measure what NVIDIA's does? Both load the same server, by turns.

    make bench-tools
    python -m bench.tester_vs_aiperf [--only known|node] [--rounds 3] [--quick]

First a server whose timing is known, because it writes down itself when requests came and tokens
left: there each tester is held to the truth of its own runs, and to the other. Then `kvota node`
with a real model: there they are held to each other, each relative to what the node says of the
same run, so that a busy machine does not decide. Figures are medians over the rounds.

Takes about four minutes on two cores. The exit status is 1 when a figure of kvota's tester is more
than 5 % off, 2 when there is nothing to compare.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.machine import sentence
from bench.server_process import ServerFailed
from bench.tester_vs_aiperf_figures import (
    TITLES,
    TOLERANCE,
    Figures,
    NotComparable,
    Wanted,
    differences,
    is_near,
    medians,
    of_node,
    of_told,
    relative,
    table,
)
from bench.tester_vs_aiperf_places import (
    Halves,
    Place,
    known_server,
    node,
    staying_on,
    write_tokenizer,
)
from bench.tester_vs_aiperf_runs import AIPERF, run_aiperf, run_kvota
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve

EXIT_APART: Final = 1
EXIT_NOTHING: Final = 2
KNOWN: Final = Wanted(num_requests=20, concurrency=4, prompt_tokens=100, output_tokens=33)
# One at a time: in a batch, the millisecond at which a prompt arrives decides whether it is read in
# this step or waits for the next, and testers' own pauses between requests would be compared.
NODE: Final = Wanted(num_requests=24, concurrency=1, prompt_tokens=128, output_tokens=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testers:
    """What both need: how often by turns, aiperf's tokenizer, and a folder for what it writes."""

    rounds: int
    tokenizer: Path
    folder: Path

    def aiperf(self, place: Place, wanted: Wanted, at: int) -> Figures:
        folder = self.folder / f"{place.model}-{at}"
        return run_aiperf(place, wanted, at, self.tokenizer, folder)


def on_known_server(testers: Testers, place: Place) -> bool:
    """Whether kvota's tester tells the truth, and what aiperf tells. Prints both."""
    ours, truth, theirs, their_truth = [], [], [], []
    for at in range(testers.rounds):
        ours.append(run_kvota(place, KNOWN, at))
        truth.append(of_told(place.told()[-KNOWN.num_requests :]))  # without what came before
        theirs.append(testers.aiperf(place, KNOWN, at))
        their_truth.append(of_told(place.told()[-KNOWN.num_requests :]))
    told = {"kvota": medians(ours), "truth": medians(truth)}
    both = {"kvota": medians(ours), "aiperf": medians(theirs)}
    print(f"A server of known timing; {KNOWN}\n")
    print(table(told), table({"aiperf": medians(theirs), "truth": medians(their_truth)}), sep="\n")
    print(table(both))
    return is_near(differences(*told.values())) and is_near(differences(*both.values()))


def on_node(testers: Testers, place: Place) -> bool:
    """Whether both testers agree on how much slower a node looks from outside than it says it is.

    So a machine that is busier in one run than in the next makes no difference. Prints it all.
    """
    ours, inside, theirs, their_inside = [], [], [], []
    for at in range(testers.rounds):
        pages = [place.page()]
        ours.append(run_kvota(place, NODE, at))
        pages.append(place.page())
        theirs.append(testers.aiperf(place, NODE, at))
        pages.append(place.page())
        inside.append(of_node(pages[0], pages[1], NODE))
        their_inside.append(of_node(pages[1], pages[2], NODE))
    print(f"kvota node, {place.model}; {NODE}\n")
    print(table({"kvota": medians(ours), "node then": medians(inside)}))
    print(table({"aiperf": medians(theirs), "node then": medians(their_inside)}))
    print(table({"kvota": medians(ours), "aiperf": medians(theirs)}))
    apart = differences(
        medians([relative(*both) for both in zip(ours, inside, strict=True)]),
        medians([relative(*both) for both in zip(theirs, their_inside, strict=True)]),
    )
    told = ", ".join(f"{TITLES[name]} {value:+.1%}" for name, value in apart.items())
    print(f"kvota / aiperf, each relative to the node then: {told}\n")
    return is_near(apart)


def compare(testers: Testers, halves: Halves, model: Path, only: str | None) -> bool:
    """Raises NotComparable and ServerFailed."""
    words = write_tokenizer(model, testers.tokenizer)
    is_good = True
    with staying_on(halves.testers):
        if only in (None, "known"):
            with known_server(halves) as place:
                is_good = on_known_server(testers, place)
        if only in (None, "node"):
            with node(halves, model, words) as place:
                is_good = on_node(testers, place) and is_good
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare kvota's load tester with aiperf.")
    parser.add_argument("--only", choices=("known", "node"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round: does it all run?")
    given = parser.parse_args()
    if not AIPERF.exists():
        print(f"{AIPERF} is not there; `make bench-tools` installs it.", file=sys.stderr)
        return EXIT_NOTHING
    print(f"{sentence()}\n")
    model = resolve(DEFAULT_MODEL, cache_dir_of(os.environ))
    with tempfile.TemporaryDirectory(prefix="kvota-aiperf-") as name:
        folder = Path(name)
        testers = Testers(
            rounds=1 if given.quick else given.rounds,
            tokenizer=folder / "tokenizer",
            folder=folder,
        )
        try:
            is_good = compare(testers, Halves.of_this_process(), model, given.only)
        except (NotComparable, ServerFailed) as error:
            print(f"No comparison: {error}", file=sys.stderr)
            return EXIT_NOTHING
    if not is_good:
        print(f"A figure of kvota's tester is more than {TOLERANCE:.0%} off.", file=sys.stderr)
    return 0 if is_good else EXIT_APART


if __name__ == "__main__":
    sys.exit(main())
