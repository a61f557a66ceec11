"""The workloads of driver/src/work, for queues in Python: the same names, rows and knobs."""

import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time

FULL, NORMAL = "FULL", "NORMAL"
DELAYED, GATED, DONE, DEAD = "delayed", "gated", "done", "dead"

KNOB = os.environ.get
OUT = os.path.abspath(KNOB("PEERS_OUT", "made/by-hand"))
TEMPLATES = os.path.abspath(KNOB("PEERS_TEMPLATES") or OUT + "/templates")
WORK = KNOB("PEERS_WORK", "W1")
CLASS = KNOB("PEERS_CLASS", "")
ROUND = KNOB("PEERS_ROUND", "1")
SECS = float(KNOB("SECS", "1"))
READY = int(KNOB("W2_READY", "20000"))
DEPTHS = [int(depth) for depth in KNOB("W6_READY", "1000,100000,1000000").split(",")]
BEHIND = int(KNOB("W6_BEHIND", "1000000"))
STATES = KNOB("W6_STATES", "1") == "1"
WAKES = int(KNOB("W7_WAKES", "60"))
MINUTE = float(KNOB("W9_SECS", "60"))
RATE = int(KNOB("W9_RATE", "200"))
LIVE = int(KNOB("W9_LIVE", "5000"))
QUIET = float(KNOB("QUIET", "2"))

SMALL = 256
STAMP = 20
WARM_UP = 5
WORTH_KEEPING = 50_000
SIZES = [(256, "256 B", 20_000), (16 << 10, "16 KiB", 5_000), (1 << 20, "1 MiB", 150)]


class Unable(Exception):
    """The peer has no such thing."""


class Contender:
    """A queue with one setting. What it cannot do stays None or raises Unable."""

    peer = ""
    cls = FULL
    setting = "default"
    lacks = []  # (workload, by the beginning of its name; why)
    shared = False  # One object for all threads, else one for each.

    def open(self, folder):
        raise NotImplementedError

    def close(self, queue):
        pass

    def enqueue(self, queue, text):
        raise NotImplementedError

    def claim(self, queue):
        """What was taken, or None."""
        raise Unable

    def text(self, message):
        raise NotImplementedError

    def ack(self, queue, message):
        raise Unable

    def enqueue_batch(self, queue, text, count):
        raise Unable

    def fill(self, queue, text, count):
        self.enqueue_batch(queue, text, count)

    def fill_behind(self, queue, state, text, count):
        raise Unable

    def wait(self, queue):
        raise Unable

    def settings(self, queue):
        """The version of SQLite, and what the connections say."""
        raise NotImplementedError


def payload(size):
    return ("abcdefghijklmnopqrstuvwxyz" * (size // 26 + 1))[:size]


def stamped(size):
    return f"{time.monotonic_ns():020d}" + payload(size)[STAMP:]


def mixed(index):
    place = index * 37 % 100
    return 64 << 10 if place == 0 else 4 << 10 if place < 10 else SMALL


def append(file, *columns):
    line = "\t".join(str(column) for column in columns)
    print(line, flush=True)
    with open(f"{OUT}/{file}", "a") as out:
        out.write(line + "\n")


def row(contender, work, figure, times=None, errors=None, **fields):
    columns = [f"{name}={value}" for name, value in fields.items()]
    if times:
        times = sorted(times)
        columns.append(f"samples={len(times)}")
        for name, part in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1)):
            columns.append(f"{name}={times[int((len(times) - 1) * part)] * 1e6:.1f}")
    columns += [f"error={count} x {text}" for text, count in (errors or {}).items()]
    append("rows.tsv", contender.cls, ROUND, contender.peer, contender.setting, work, f"{figure:.2f}", *columns)


class Folder:
    """A folder of its own, gone afterwards."""

    made = 0

    def __init__(self, contender):
        Folder.made += 1
        name = "".join(c if c.isalnum() else "_" for c in contender.peer)
        self.name = name
        self.path = f"{OUT}/data/{name}-{os.getpid()}-{Folder.made}"
        shutil.rmtree(self.path, ignore_errors=True)
        os.makedirs(self.path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def fill(self, contender, what, count, fill):
        """Lays out messages; deep backlogs are copied from a template."""

        def lay_out(path):
            queue = contender.open(path)
            fill(queue)
            contender.close(queue)

        if count < WORTH_KEEPING:
            return lay_out(self.path)
        template = f"{TEMPLATES}/{self.name}-{what}-{count}"
        if not os.path.exists(template):
            shutil.rmtree(template + ".part", ignore_errors=True)
            os.makedirs(template + ".part")
            lay_out(template + ".part")
            os.rename(template + ".part", template)
        shutil.copytree(template, self.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*-shm"))
        settle_disk()


def settle_disk():
    subprocess.run(["sync", "-f", OUT], check=False)


def syncs():
    """What sync.c has counted in this process."""
    try:
        with open(os.environ["SYNC_FILE"], "rb") as file:
            return struct.unpack("<Q", file.read(8))[0]
    except (KeyError, OSError, struct.error):
        return float("nan")


def busy():
    with open("/proc/stat") as stat:
        ticks = [int(tick) for tick in stat.readline().split()[1:]]
    return (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7]) / os.sysconf("SC_CLK_TCK")


def own():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Meter:
    """What a measurement costs; begins when others are quiet."""

    def __init__(self):
        settle_disk()
        waited = time.perf_counter()
        while time.perf_counter() - waited < QUIET:
            before, mine, began = busy(), own(), time.perf_counter()
            time.sleep(0.25)
            if (busy() - before - (own() - mine)) / (time.perf_counter() - began) < 0.25:
                break
        self.began, self.busy, self.own, self.syncs = time.perf_counter(), busy(), own(), syncs()

    def stop(self, messages):
        wall = time.perf_counter() - self.began
        mine = own() - self.own
        others = max(0, (busy() - self.busy - mine) / (os.cpu_count() * wall) * 100)
        messages = max(messages, 1)
        return {
            "cpu": f"{mine * 1e6 / messages:.1f}",
            "others": f"{others:.0f}",
            "syncs": f"{(syncs() - self.syncs) / messages:.3f}",
        }


class Repeated:
    def __init__(self):
        self.count, self.time, self.times = 0, 0.0, []

    def go_on(self, call, secs, most=10**9):
        """The call answers how many messages it moved; none ends it."""
        began = before = time.perf_counter()
        count = 0
        while count < most and before - began < secs:
            moved = call()
            after = time.perf_counter()
            if not moved:
                break
            count += moved
            self.times.append(after - before)
            before = after
        self.count += count
        self.time += time.perf_counter() - began
        return count

    def rate(self):
        return self.count / self.time


def repeat(call, most=10**9):
    done = Repeated()
    done.go_on(call, SECS, most)
    return done


def claim_ack(contender, queue):
    message = contender.claim(queue)
    if message is None:
        return 0
    contender.ack(queue, message)
    return 1


def show(contender, work):
    with Folder(contender) as folder:
        queue = contender.open(folder.path)
        contender.enqueue(queue, payload(SMALL))
        claim_ack(contender, queue)
        version, settings = contender.settings(queue)
        append("settings.tsv", contender.cls, contender.peer, contender.setting, version, settings)
        for lack, why in contender.lacks:
            append("lacks.tsv", contender.cls, contender.peer, contender.setting, lack, why)
        contender.close(queue)


def enqueue(contender, work, size=SMALL):
    with Folder(contender) as folder:
        queue = contender.open(folder.path)
        text = payload(size)
        meter = Meter()
        done = repeat(lambda: contender.enqueue(queue, text) or 1)
        row(contender, work, done.rate(), done.times, **meter.stop(done.count))
        contender.close(queue)


def claim(contender, work, size=SMALL, ready=READY):
    with Folder(contender) as folder:
        queue = contender.open(folder.path)
        contender.fill(queue, payload(size), ready)
        meter = Meter()
        done = repeat(lambda: claim_ack(contender, queue))
        row(contender, work, done.rate(), done.times, **meter.stop(done.count))
        contender.close(queue)


def together(contender, work, producers, consumers):
    with Folder(contender) as folder:
        first = contender.open(folder.path)
        start, stop = threading.Barrier(producers + consumers + 1), threading.Event()
        counts, times, errors = [0] * (producers + consumers), [], {}
        text = payload(SMALL)

        def run(index):
            queue = first if contender.shared else contender.open(folder.path)
            mine = []
            start.wait()
            while not stop.is_set():
                before = time.perf_counter()
                try:
                    if index < producers:
                        contender.enqueue(queue, text)
                        mine.append(time.perf_counter() - before)
                    elif not claim_ack(contender, queue):
                        time.sleep(0.0005)
                        continue
                    counts[index] += 1
                except Exception as error:  # All of a peer's errors are counted, whatever they are.
                    errors[str(error)[:60]] = errors.get(str(error)[:60], 0) + 1
            times.extend(mine)
            if not contender.shared:
                contender.close(queue)

        meter = Meter()
        threads = [threading.Thread(target=run, args=(index,)) for index in range(producers + consumers)]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        time.sleep(SECS)
        stop.set()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - began
        produced, consumed = sum(counts[:producers]), sum(counts[producers:])
        fields = meter.stop(produced + consumed)
        if consumers:
            fields["produced"] = f"{produced / spent:.1f}"
        row(contender, work, (consumed if consumers else produced) / spent, times, errors, **fields)
        contender.close(first)


def batch(contender, work, size):
    with Folder(contender) as folder:
        queue = contender.open(folder.path)
        text = payload(SMALL)
        meter = Meter()
        done = repeat(lambda: contender.enqueue_batch(queue, text, size) or size, most=1_000_000)
        row(contender, work, done.rate(), done.times, **meter.stop(done.count))
        contender.close(queue)


def depth(contender, work, what, ready, lay_out, count):
    with Folder(contender) as folder:
        folder.fill(contender, what, count, lay_out)
        queue = contender.open(folder.path)
        # One that is not timed: a file that was just opened may have to recover first.
        claim_ack(contender, queue)
        contender.fill(queue, payload(SMALL), 1)
        step = min(5_000, max(50, ready // 10))
        done, spent = Repeated(), 0
        meter = Meter()
        while done.time < SECS:
            before = syncs()
            moved = done.go_on(lambda: claim_ack(contender, queue), SECS - done.time, step)
            spent += syncs() - before
            if done.time < SECS:
                if not moved:
                    break
                contender.fill(queue, payload(SMALL), moved)
        others = meter.stop(done.count)["others"]
        row(contender, work, done.rate(), done.times, others=others, syncs=f"{spent / max(done.count, 1):.3f}")
        contender.close(queue)


def wake(contender, work):
    with Folder(contender) as folder:
        queue = contender.open(folder.path)
        settle_disk()
        ages, came = [], threading.Semaphore(0)

        def consume():
            for _ in range(WAKES + WARM_UP):
                message = contender.wait(queue)
                ages.append((time.monotonic_ns() - int(contender.text(message)[:STAMP])) / 1e9)
                contender.ack(queue, message)
                came.release()

        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.5)
        for index in range(WAKES + WARM_UP):
            time.sleep((20 + index * 7 % 30) / 1000)
            contender.enqueue(queue, stamped(SMALL))
            if not came.acquire(timeout=20):
                raise RuntimeError("nobody woke up")
        ages = sorted(ages[WARM_UP:])
        row(contender, work, ages[len(ages) // 2] * 1e6, ages)


def minute(contender, work):
    with Folder(contender) as folder:
        first = contender.open(folder.path)
        bytes_in = bytes_out = 0
        for size in (256, 4 << 10, 64 << 10):
            count = sum(1 for index in range(LIVE) if mixed(index) == size)
            if count:
                contender.fill(first, stamped(size), count)
            bytes_in += count * size
        found = {"enqueue": [], "claim": [], "in": bytes_in, "out": bytes_out}
        errors, over, lock = {}, threading.Event(), threading.Lock()

        def paced(kind, side):
            queue = first if contender.shared else contender.open(folder.path)
            step = 2 / RATE
            due, index, mine = time.perf_counter() + step * side / 2, side, []
            while not over.is_set():
                early = due - time.perf_counter()
                if early > 0:
                    time.sleep(early)
                begun = time.perf_counter() if early > 0 else due
                due += step
                try:
                    if kind == "enqueue":
                        size = mixed(index)
                        index += 2
                        contender.enqueue(queue, stamped(size))
                        mine.append(time.perf_counter() - begun)
                        with lock:
                            found["in"] += size
                    else:
                        message = contender.claim(queue)
                        if message is None:
                            continue
                        mine.append(time.perf_counter() - begun)
                        with lock:
                            found["out"] += len(contender.text(message))
                        contender.ack(queue, message)
                except Exception as error:  # As above.
                    with lock:
                        errors[str(error)[:60]] = errors.get(str(error)[:60], 0) + 1
            with lock:
                found[kind].extend(mine)
            if not contender.shared:
                contender.close(queue)

        threads = [threading.Thread(target=paced, args=(kind, side)) for kind in ("enqueue", "claim") for side in (0, 1)]
        meter, log = Meter(), 0
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        while time.perf_counter() - began < MINUTE:
            time.sleep(0.1)
            log = max(log, sizes(folder.path)[0])
        over.set()
        for thread in threads:
            thread.join()
        cost = meter.stop(len(found["claim"]))
        row(contender, "W9 enqueue", len(found["enqueue"]) / MINUTE, found["enqueue"], errors, **cost)
        row(contender, "W9 claim", len(found["claim"]) / MINUTE, found["claim"], **cost)
        live = found["in"] - found["out"]
        row(contender, "W9 log, MiB", log / (1 << 20))
        contender.close(first)  # Writes the log back.
        row(contender, "W9 file over live data", sizes(folder.path)[1] / max(live, 1), live=live)


def sizes(folder):
    """The bytes of the log and of the data."""
    log = data = 0
    for file in os.scandir(folder):
        if file.name.endswith("-shm") or not file.is_file():
            continue
        if file.name.endswith(("-wal", "-journal")):
            log += file.stat().st_size
        else:
            data += file.stat().st_size
    return log, data


def attempt(contender, work, run, *arguments):
    if any(work.startswith(lack) for lack, _ in contender.lacks):
        return
    try:
        run(contender, work, *arguments)
    except Exception as error:  # As above.
        print(f"{contender.peer} ({contender.cls}, {contender.setting}): {work}: {error!r}", file=sys.stderr)
        append("failures.tsv", contender.cls, ROUND, contender.peer, contender.setting, work, repr(error)[:100])


def run(contenders):
    os.makedirs(OUT, exist_ok=True)
    for contender in contenders:
        if CLASS not in ("", contender.cls):
            continue
        small = payload(SMALL)
        if WORK == "SHOW":
            attempt(contender, "SHOW", show)
        elif WORK == "W1":
            attempt(contender, "W1 enqueue x1", enqueue)
        elif WORK == "W2":
            attempt(contender, "W2 claim+ack x1", claim)
        elif WORK == "W3":
            attempt(contender, "W3 enqueue x4", together, 4, 0)
            attempt(contender, "W3 enqueue x16", together, 16, 0)
        elif WORK == "W4":
            attempt(contender, "W4 4+4", together, 4, 4)
        elif WORK == "W5":
            for size in (100, 1_000):
                attempt(contender, f"W5 enqueue batch {size}", batch, size)
        elif WORK == "W6":
            for ready in DEPTHS:
                fill = lambda queue, ready=ready: contender.fill(queue, small, ready)
                attempt(contender, f"W6 at {ready} ready", depth, "ready", ready, fill, ready)
            for state in (DELAYED, GATED, DONE, DEAD) if STATES else ():
                def lay_out(queue, state=state):
                    contender.fill_behind(queue, state, small, BEHIND)
                    contender.fill(queue, small, 1_000)
                attempt(contender, f"W6 behind {state}", depth, state, 1_000, lay_out, BEHIND)
        elif WORK == "W7":
            attempt(contender, "W7 wake in process", wake)
        elif WORK == "W8":
            for size, name, ready in SIZES:
                attempt(contender, f"W8 enqueue {name}", enqueue, size)
                attempt(contender, f"W8 claim+ack {name}", claim, size, max(20, ready * READY // 20_000))
        elif WORK == "W9":
            attempt(contender, "W9 minute", minute)
    # A consumer that waits for good must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)
