#!/usr/bin/env python3
"""The table of a run, or of several that did parts of it: report.py made/runs/latest [made/runs/…]"""

import os
import statistics
import sys
from collections import defaultdict

RUNS = sys.argv[1:]

# The workloads in the table's order: the beginning of a row's name, what the table calls it, and whether less is better.
WORKLOADS = [
    ("W1 enqueue x1", "W1 enqueue ×1", False),
    ("W2 claim+ack x1", "W2 claim+ack ×1", False),
    ("W2 claim+ack x4", "W2 its workers ×4", False),
    ("W2 claim+ack x16", "W2 its workers ×16", False),
    ("W3 enqueue x4", "W3 enqueue ×4", False),
    ("W3 enqueue x16", "W3 enqueue ×16", False),
    ("W4 4+4", "W4 4 producers + 4 consumers, consumed", False),
    ("W5 enqueue batch 100", "W5 enqueue, batches of 100", False),
    ("W5 enqueue batch 1000", "W5 enqueue, batches of 1,000", False),
    ("W5 claim+ack batch 100", "W5 claim+ack, batches of 100", False),
    ("W5 claim+ack batch 1000", "W5 claim+ack, batches of 1,000", False),
    ("W6 at", None, False),
    ("W6 behind delayed", "W6 claim+ack behind delayed", False),
    ("W6 behind gated", "W6 claim+ack behind gated", False),
    ("W6 behind done", "W6 claim+ack beside done", False),
    ("W6 behind dead", "W6 claim+ack beside dead", False),
    ("W7 wake in process", "W7 wake in process, p50 µs", True),
    ("W7 wake across", "W7 wake across processes, p50 µs", True),
    ("W8 enqueue 256 B", "W8 enqueue 256 B", False),
    ("W8 enqueue 16 KiB", "W8 enqueue 16 KiB", False),
    ("W8 enqueue 1 MiB", "W8 enqueue 1 MiB", False),
    ("W8 claim+ack 256 B", "W8 claim+ack 256 B", False),
    ("W8 claim+ack 16 KiB", "W8 claim+ack 16 KiB", False),
    ("W8 claim+ack 1 MiB", "W8 claim+ack 1 MiB", False),
    ("W9 enqueue p50", "W9 enqueue p50, µs", True),
    ("W9 enqueue p99", "W9 enqueue p99, µs", True),
    ("W9 enqueue p99.9", "W9 enqueue p99.9, µs", True),
    ("W9 claim p50", "W9 claim p50, µs", True),
    ("W9 claim p99", "W9 claim p99, µs", True),
    ("W9 claim p99.9", "W9 claim p99.9, µs", True),
    ("W9 claim rate", "W9 claimed a second", False),
    ("W9 log, MiB", "W9 log at its largest, MiB", True),
    ("W9 file over live data", "W9 file over live data", True),
]
FLOORS = ("bare", "bare, one connection", "bare, group commit")
CLASSES = {"FULL": "each commit is on disk when it returns", "NORMAL": "commits reach the disk at checkpoints"}


class Row:
    def __init__(self, columns):
        self.cls, round_, self.peer, self.setting, self.work, figure = columns[:6]
        self.round, self.figure = int(round_), float(figure)
        fields = [field.split("=", 1) for field in columns[6:]]
        self.fields = {name: value for name, value in fields if name != "error"}
        self.errors = [value for name, value in fields if name == "error"]

    def field(self, name):
        return float(self.fields.get(name, "nan"))

    def with_figure(self, work, figure):
        fields = [f"{name}={value}" for name, value in self.fields.items()]
        return Row([self.cls, self.round, self.peer, self.setting, work, figure, *fields])


def lines(file):
    """The columns of each line, of all runs."""
    found = []
    for run in RUNS:
        path = os.path.join(run, file)
        if os.path.exists(path):
            with open(path) as text:
                found += [line.rstrip("\n").split("\t") for line in text]
    return found


def median(values):
    known = [value for value in values if value == value]
    return statistics.median(known) if known else None


def number(value):
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(heads, rows):
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# (class, workload) -> (peer, setting) -> its rows
figures = defaultdict(lambda: defaultdict(list))
for columns in lines("rows.tsv"):
    row = Row(columns)
    rows = [row]
    if row.work in ("W9 enqueue", "W9 claim"):
        rows = [row.with_figure(f"{row.work} {part}", row.field(part)) for part in ("p50", "p99", "p99.9")]
        rows.append(row.with_figure(f"{row.work} rate", row.figure))
    for one in rows:
        if one.figure == one.figure:
            figures[one.cls, one.work][one.peer, one.setting].append(one)

settings = {(cls, peer, setting): (version, read) for cls, peer, setting, version, read in lines("settings.tsv")}
on_sqlite = {peer for (_, peer, _), (version, _) in settings.items() if version.startswith("SQLite")}


def workloads():
    """The names of the rows, in the table's order, with how the table calls them."""
    names = {work for _, work in figures}
    for begins, title, less in WORKLOADS:
        if title:
            if begins in names:
                yield begins, title, less
            continue
        depths = sorted((name for name in names if name.startswith(begins)), key=lambda name: int(name.split()[2]))
        for name in depths:
            yield name, f"W6 claim+ack at {int(name.split()[2]):,} ready", less


def middle(rows):
    return median(row.figure for row in rows) if rows else None


def ratio(ours, theirs, less):
    """Above 1 ours is better."""
    if not ours or not theirs or not middle(ours) or not middle(theirs):
        return "–"
    quotient = lambda a, b: b / a if less else a / b
    by_round = {row.round: row.figure for row in theirs}
    each = [quotient(row.figure, by_round[row.round]) for row in ours if by_round.get(row.round) and row.figure]
    spread = f" ({min(each):.2f}–{max(each):.2f})" if len(each) > 1 else ""
    return f"**{quotient(middle(ours), middle(theirs)):.2f}**{spread}"


def best(candidates, less):
    candidates = {who: rows for who, rows in candidates.items() if middle(rows)}
    pick = min if less else max
    return pick(candidates.items(), key=lambda item: middle(item[1])) if candidates else None


def of(rows, *peers):
    return next((found for (peer, _), found in rows.items() if peer in peers), None)


def noisy(rows):
    return "~" if rows and (median(row.field("others") for row in rows) or 0) > 15 else ""


def compared(work, peer):
    """Whether a peer competes: it has acks, and its commits are the class's."""
    if peer.startswith(("relet", "bare", "raw", "yaque")):
        return False
    return not (peer == "huey" and ("claim" in work or "W4" in work or "W6" in work))


def summary(cls):
    heads = ["workload", "relet", "pool", "bare", "raw", "relet / bare", "relet / raw"]
    heads += ["best peer on SQLite", "relet / it", "pool / it", "best of the others", "relet / it"]
    body = []
    for work, title, less in workloads():
        rows = figures.get((cls, work), {})
        if not rows:
            continue
        relet, pool, bare, raw = of(rows, "relet"), of(rows, "relet pool"), of(rows, "bare"), of(rows, "raw")
        peers = {who: found for who, found in rows.items() if compared(work, who[0])}
        sqlite = best({who: found for who, found in peers.items() if who[0] in on_sqlite}, less)
        other = best({who: found for who, found in peers.items() if who[0] not in on_sqlite}, less)
        named = lambda one: f"{one[0][0]} {number(middle(one[1]))}{noisy(one[1])}" if one else "–"
        shown = lambda found: number(middle(found)) + noisy(found)
        theirs = lambda one: one[1] if one else None
        body.append(
            [title, shown(relet), shown(pool), shown(bare), shown(raw), ratio(relet or pool, bare, less)]
            + [ratio(relet or pool, raw, less), named(sqlite), ratio(relet, theirs(sqlite), less)]
            + [ratio(pool, theirs(sqlite), less), named(other), ratio(relet or pool, theirs(other), less)]
        )
    table(heads, body)


def everything(cls):
    """Each contender with each workload; in brackets relet (where it has none, its pool) over it."""
    contenders = [(peer, setting) for c, peer, setting in settings if c == cls]
    for group in ("W1 W2 W3 W4", "W5 W6", "W7 W8", "W9"):
        columns = [one for one in workloads() if one[0][:2] in group.split() and figures.get((cls, one[0]))]
        if not columns:
            continue
        body = []
        for peer, setting in contenders:
            cells = []
            for work, _, less in columns:
                rows = figures[cls, work]
                mine = rows.get((peer, setting))
                ours = of(rows, "relet") or of(rows, "relet pool")
                text = number(middle(mine)) + noisy(mine)
                if mine and ours and not peer.startswith("relet") and middle(mine) and middle(ours):
                    times = middle(mine) / middle(ours) if less else middle(ours) / middle(mine)
                    text += f" ({times:.2f})"
                cells.append(text)
            if any(cell != "–" for cell in cells):
                body.append([peer, f"{settings[cls, peer, setting][1]} ({setting})", *cells])
        table(["contender", "durability"] + [title for _, title, _ in columns], body)


def durability():
    body = []
    for (cls, peer, setting), (version, read) in settings.items():
        syncs = []
        for works in (["W1 enqueue x1"], ["W2 claim+ack x1"]):
            rows = [row for work in works for row in figures.get((cls, work), {}).get((peer, setting), [])]
            value = median(row.field("syncs") for row in rows)
            syncs.append("–" if value is None else f"{value:.2f}")
        body.append([peer, cls, setting, version, read, *syncs])
    table(["contender", "class", "setting", "stores with", "its connections say", "fsyncs an enqueue", "a claim+ack"], body)


def left_out():
    for peer, why in sorted({tuple(line) for line in lines("missing.tsv")}):
        print(f"* {peer}: {why}.")
    reasons = defaultdict(list)
    for _, peer, _, work, why in lines("lacks.tsv"):
        if work not in reasons[peer, why]:
            reasons[peer, why].append(work)
    for (peer, why), works in reasons.items():
        print(f"* {peer}: {', '.join(works)}: {why}.")
    print()


def failed():
    """What was tried and did not work, and the errors that calls met meanwhile."""
    works = defaultdict(list)
    for cls, _, peer, _, work, why in lines("failures.tsv"):
        if work not in works[peer, cls, why]:
            works[peer, cls, why].append(work)
    for (peer, cls, why), names in works.items():
        print(f"* {peer}, {cls}: {', '.join(names)}: {why}.")
    for (cls, work), contenders in figures.items():
        for (peer, setting), rows in contenders.items():
            for error in sorted({error for row in rows for error in row.errors}):
                if not work.endswith((" p99", " p99.9", " rate")):
                    print(f"* {peer} ({setting}), {cls}: {work}: {error}.")
    print()


def spread():
    """Every row, in a file of its own."""
    with open(os.path.join(RUNS[-1], "ALL.md"), "w") as file:
        heads = ["class", "workload", "contender", "setting", "median", "smallest–largest", "rounds"]
        heads += ["p50 µs", "p99 µs", "p99.9 µs", "fsyncs a message", "cpu µs a message", "others %", "errors"]
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), file=file)
        for (cls, work), contenders in sorted(figures.items()):
            for (peer, setting), rows in contenders.items():
                values = [row.figure for row in rows]
                cells = [cls, work, peer, setting, number(middle(rows))]
                cells += [f"{number(min(values))}–{number(max(values))}", str(len(rows))]
                for name in ("p50", "p99", "p99.9", "syncs", "cpu", "others"):
                    cells.append(number(median(row.field(name) for row in rows)))
                cells.append("; ".join(sorted({error for row in rows for error in row.errors})))
                print("| " + " | ".join(cells) + " |", file=file)


print("# relet beside its peers\n")
print("\n".join(" ".join(columns) + "  " for columns in lines("about.txt")))
for (cls, work), contenders in figures.items():
    if work.startswith("DISK"):
        rows = contenders["disk", "-"]
        print(f"the disk: {work[5:]} of 4 KiB + fdatasync: {number(middle(rows))}/s, p50 {number(median(r.field('p50') for r in rows))} µs  ")
print(
    """
Medians over the rounds, in messages a second unless the workload says otherwise. A ratio above 1 means that relet is
better: of the medians, and in brackets the smallest and the largest of the rounds. `bare` is rusqlite with an id, a
payload, a status and one index; `raw` what a careful person writes by hand. ~ means that others used more than 15 % of
the processors meanwhile. – means that it has no such thing: the list at the end says why.
"""
)
for cls, meaning in CLASSES.items():
    if any(key[0] == cls for key in figures):
        print(f"## {cls}: {meaning}\n")
        summary(cls)
for cls in CLASSES:
    if any(key[0] == cls for key in figures):
        print(f"## {cls}: every contender; in brackets relet over it\n")
        everything(cls)
print("## Durability, as the contenders' own connections say it, and fsyncs counted\n")
durability()
print("## Left out, and why\n")
left_out()
print("## Failures, and errors that calls met\n")
failed()
spread()
print("Every row with its spread, latencies and costs: ALL.md beside this file.")
