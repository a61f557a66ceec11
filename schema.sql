-- relet, schema version 1. Open it with the sqlite3 shell; this file is what runs.
--
-- The life of a message (src/state.rs holds the same table):
--
--  enqueue ──▶ pending ──route──▶ routing ──route──▶ queued | pending_local      all four are claimable
--                └───────────────────┴──────────────────────┘
--                                    │ claim: new token, attempts + 1
--                                    ▼
--         ┌───────────────────── processing ◀──── self-reclaim: new token ────┐
--         │                      │  │  │  └── defer: stays processing, keeps its worker, gives up its lease,
--         │ack                   │  │  │      waits in relet_retry_queue, costs no attempt ──────────────┘
--         ▼                      │  │  └ release: back to its route, costs no attempt (own ceiling)
--        done                    │  └ fail, tries left: back to its route, due after backoff
--  (deleted, or kept             └ fail with no tries left · reject · budget spent · expired ──▶ dead ──redrive──▶ its route
--   for a set time)
--  cancel: from any live status ──▶ cancelled
--
-- Instants (…_at, …_until) are unix milliseconds, UTC, on the store's own time: the wall clock as it was when the store was made, which goes
-- on with the machine whatever is done to the wall clock since (relet_meta: clock_base is what it is more than the time since
-- the boot, clock_skew what the wall clock is more than it; usually 0). The ends of leases alone are in milliseconds of the clock that
-- leases run on: the time this machine has been awake since its boot (relet_meta: boot_id), or the wall clock where there is no such clock.

-- What is true of the whole store, a row each.
CREATE TABLE relet_meta (
  key   TEXT PRIMARY KEY NOT NULL,
  value ANY                          -- schema_version, store_id, file, owned, epoch, boot_id, boot_mark, clock_base, clock_skew, clock_ahead, clock_sure, opening, epoch_floor, seen_at, seen_awake, incarnation, touched, reserve, file_max
) STRICT, WITHOUT ROWID;

-- One row a queue, made by its first enqueue; never deleted, so that an id means the same queue for ever.
CREATE TABLE relet_queues (
  id            INTEGER PRIMARY KEY,
  name          TEXT    NOT NULL UNIQUE,
  max_attempts  INTEGER,             -- NULL: the store's default
  lease_ms      INTEGER,             -- NULL: the store's default
  retry         TEXT,                -- a backoff policy as JSON; NULL: the store's default
  gate          INTEGER,             -- relet_gates.id: the gate of messages that are enqueued without one
  gated         INTEGER NOT NULL DEFAULT 0 CHECK (gated = 0 OR gated = 1),   -- whether it has ever had a message with a gate
  ageing_ms     INTEGER CHECK (ageing_ms > 0),   -- waiting that long is worth one step of priority; NULL: priority is strict
  paused_until  INTEGER              -- nothing is handed out before this instant
) STRICT;

-- Counters, kept in the transaction that changes the rows, so that stats cost the same at any size. A claim changes none of
-- them: what is in processing is what is deferred, and what is held, which is counted from the leases.
CREATE TABLE relet_counters (
  queue         INTEGER PRIMARY KEY, -- relet_queues.id; 0: the whole store
  last_id       INTEGER NOT NULL DEFAULT 0,                         -- of the whole store: the largest message id ever given out
  pending       INTEGER NOT NULL DEFAULT 0 CHECK (pending >= 0),    -- live messages of this route, waiting or held, not deferred
  routing       INTEGER NOT NULL DEFAULT 0 CHECK (routing >= 0),
  queued        INTEGER NOT NULL DEFAULT 0 CHECK (queued >= 0),
  pending_local INTEGER NOT NULL DEFAULT 0 CHECK (pending_local >= 0),
  deferred      INTEGER NOT NULL DEFAULT 0 CHECK (deferred >= 0),
  done          INTEGER NOT NULL DEFAULT 0 CHECK (done >= 0),
  dead          INTEGER NOT NULL DEFAULT 0 CHECK (dead >= 0),
  cancelled     INTEGER NOT NULL DEFAULT 0 CHECK (cancelled >= 0),
  retrying      INTEGER NOT NULL DEFAULT 0 CHECK (retrying >= 0),   -- rows of relet_retry_queue that have a reason
  acked         INTEGER NOT NULL DEFAULT 0                          -- messages ever acked, deleted ones too
) STRICT;
INSERT INTO relet_counters (queue) VALUES (0);

-- Named valves. A closed one moves no rows: what waits behind it stays in a line of its own in relet_gated.
CREATE TABLE relet_gates (
  id           INTEGER PRIMARY KEY,
  name         TEXT    NOT NULL UNIQUE,
  closed_until INTEGER,              -- nothing passes before this instant
  closed_at    INTEGER,              -- when it was closed last, for whoever reads this
  slots        INTEGER CHECK (slots > 0),   -- concurrency: at most so many claims through it at a time; NULL: any number
  rate         INTEGER,              -- at most so many messages …
  period_ms    INTEGER,              -- … in any such span of time
  burst        INTEGER,              -- and so many of them at once
  full_at      INTEGER,              -- when the bucket is full again, in milliseconds of the leases' clock, times rate
  window       INTEGER CHECK (window > 0),  -- slow start after it was closed: at most so many at a time; NULL: that is over
  CHECK ((rate IS NULL) = (period_ms IS NULL)),
  CHECK ((rate IS NULL) = (burst IS NULL)),
  CHECK ((rate IS NULL) = (full_at IS NULL)),
  CHECK (rate > 0 AND period_ms > 0 AND burst > 0)
) STRICT;

-- Recurring enqueues. The tick and its message are one commit.
CREATE TABLE relet_schedules (
  name      TEXT    PRIMARY KEY NOT NULL,
  queue     TEXT    NOT NULL,        -- name of the queue
  every_ms  INTEGER CHECK (every_ms > 0),   -- a tick each time this span has passed; or
  cron      TEXT,                    -- a tick whenever this cron expression says so,
  time_zone TEXT,                    -- in this IANA time zone
  catch_up  INTEGER NOT NULL CHECK (catch_up >= 0),   -- of ticks that were missed, at most so many are made up for, the latest ones
  next_at   INTEGER NOT NULL,        -- instant of the next tick; here, all instants are the wall clock's
  set_at    INTEGER NOT NULL,        -- when that was set, so that a clock set back is noticed
  last_at   INTEGER,                 -- instant of the last tick that was enqueued
  missed_from INTEGER,               -- cron: the last ticks that were missed and not made up for, from this one on
  missed_to INTEGER,                 -- and before this one: they come again when the clock is set back to before them
  options   TEXT    NOT NULL,        -- what else is to be known of the message, as JSON
  payload   BLOB    NOT NULL,
  CHECK ((every_ms IS NULL) = (cron IS NOT NULL)),
  CHECK ((cron IS NULL) = (time_zone IS NULL)),
  CHECK ((missed_from IS NULL) = (missed_to IS NULL))
) STRICT;
CREATE INDEX relet_ticks ON relet_schedules (next_at);
CREATE INDEX relet_ticks_set ON relet_schedules (set_at);

-- What every message has, and nothing else: a feature costs only the messages that use it, since what few have lies beside, in
-- the tables below. One CHECK, since each costs every message: the other invariants are looked up by `relet doctor`, and
-- asserted by the code.
CREATE TABLE relet_messages (
  id            INTEGER PRIMARY KEY,                 -- never reused: see relet_counters.last_id
  queue         INTEGER NOT NULL,                    -- relet_queues.id
  status        TEXT    NOT NULL,                    -- its route, or 'processing', 'done', 'dead', 'cancelled'
  route         TEXT    NOT NULL,                    -- the status it has when nobody holds it: 'pending', 'routing', 'queued', 'pending_local'
  line          INTEGER,                             -- -1: it is held; else it can be claimed, and stands in line 4 * gate + route: its gate (relet_gates.id) or 0, and 0 pending, 1 routing, 2 queued, 3 pending_local; NULL: it waits, is deferred or is finished
  place         INTEGER,                             -- its place in that line: of what is held, the end of its lease; else its priority, negative, so that higher comes first
  priority      INTEGER NOT NULL,                    -- higher first
  extras        INTEGER NOT NULL DEFAULT 0,          -- what lies beside: 1 a row of relet_details, 2 its payload (relet_payloads)
  due_at        INTEGER,                             -- not before this instant; while it waits for it, it has a row in relet_retry_queue
  worker_id     TEXT,                                -- label of the worker that holds it, or keeps it while it is deferred
  incarnation   INTEGER,                             -- which start of that worker; 0: detached (a command line)
  lease_ms      INTEGER,                             -- length of its lease; NULL: it is not held
  claimed_at    INTEGER,                             -- when the claim was made
  token         INTEGER NOT NULL DEFAULT 0,          -- the newest receipt's token; only grows
  epoch         INTEGER NOT NULL DEFAULT 0,          -- the store's epoch when that token was issued
  attempts      INTEGER NOT NULL DEFAULT 0,
  crashes       INTEGER NOT NULL DEFAULT 0,
  max_attempts  INTEGER NOT NULL,
  enqueued_at   INTEGER NOT NULL,
  payload_crc   INTEGER NOT NULL,                    -- CRC-32 of the payload, checked when it is claimed
  payload       BLOB,                                -- NULL: too large to be rewritten at each claim, see relet_payloads
  CHECK ((status = 'processing') = (worker_id IS NOT NULL))
) STRICT;

-- What is held, by the end of its lease, and what can be claimed, by priority and id; nothing else, so a claim is one seek whatever
-- lies in the file. Both in one index: the last of what is held stands right before the first of what can be claimed, so that a
-- claim moves its entry within a page. Each gate's line stands by itself: a closed one is stepped over, however long it is.
CREATE INDEX relet_lines ON relet_messages (queue, line, place) WHERE line IS NOT NULL;

-- What few messages are given, or get in the course of their lives.
CREATE TABLE relet_details (
  message       INTEGER PRIMARY KEY,                 -- relet_messages.id
  key           TEXT,                                -- deduplication: one live message per queue and key, see relet_keys
  group_key     TEXT,                                -- messages of a group are handed out in order, one at a time, see relet_groups
  gate          INTEGER,                             -- relet_gates.id: the valve it passes when it is handed out
  tick_at       INTEGER,                             -- the tick of a schedule that it was enqueued for, by the wall clock
  expires_at    INTEGER,                             -- time to live: not handed out for the first time from this instant on; NULL once it was
  max_deferrals INTEGER,                             -- NULL: 1,000
  retry         TEXT,                                -- its own backoff policy as JSON; NULL: the queue's
  deferrals     INTEGER NOT NULL DEFAULT 0,
  releases      INTEGER NOT NULL DEFAULT 0,
  redrives      INTEGER NOT NULL DEFAULT 0,          -- how often it was taken back out of the dead letters
  last_error    TEXT,                                -- of the last fail or reject
  dead_reason   TEXT                                 -- which budget was spent, or why it was given up
) STRICT;

-- Payloads above 2,048 bytes: a claim or a retry rewrites the message's row, not these.
CREATE TABLE relet_payloads (
  message INTEGER PRIMARY KEY,       -- relet_messages.id
  payload BLOB NOT NULL
) STRICT;

-- The keys of live messages.
CREATE TABLE relet_keys (
  queue   INTEGER NOT NULL,
  key     TEXT    NOT NULL,
  message INTEGER NOT NULL,
  PRIMARY KEY (queue, key)
) STRICT, WITHOUT ROWID;

-- The live members of groups.
CREATE TABLE relet_groups (
  queue     INTEGER NOT NULL,
  group_key TEXT    NOT NULL,
  message   INTEGER NOT NULL,
  turn      INTEGER NOT NULL CHECK (turn = 0 OR turn = 1),   -- 1: it may be handed out; 0: it waits for another member
  PRIMARY KEY (queue, group_key, message)
) STRICT, WITHOUT ROWID;
-- At most one member of a group has its turn.
CREATE UNIQUE INDEX relet_turns ON relet_groups (queue, group_key) WHERE turn = 1;

-- Claims that have passed a gate and have not ended: a gate's concurrency is looked up here, and in their leases.
CREATE TABLE relet_passed (
  gate    INTEGER NOT NULL,          -- relet_gates.id
  message INTEGER NOT NULL,
  PRIMARY KEY (gate, message)
) STRICT, WITHOUT ROWID;

-- Messages with a time to live that are waiting to be handed out.
CREATE TABLE relet_expiry (
  expires_at INTEGER NOT NULL,
  message    INTEGER NOT NULL,
  PRIMARY KEY (expires_at, message)
) STRICT, WITHOUT ROWID;

-- The messages whose next try, or first, is set for later.
CREATE TABLE relet_retry_queue (
  queue      INTEGER NOT NULL,
  message    INTEGER NOT NULL,       -- relet_messages.id
  worker_id  TEXT,                   -- deferred: the worker it is kept for; NULL: for anyone
  due_at     INTEGER NOT NULL,       -- as in relet_messages
  on_wall    INTEGER NOT NULL DEFAULT 0 CHECK (on_wall = 0 OR on_wall = 1),   -- 1: due_at is meant by the calendar, so it is the wall clock's
  kept_until INTEGER,                -- deferred: from this instant on, anyone may take it
  behind     INTEGER NOT NULL DEFAULT 0 CHECK (behind = 0 OR behind = 1),   -- 1: the turn of its group comes first
  reason     TEXT,                   -- the error, or why it was deferred; NULL: it has not been tried
  count      INTEGER NOT NULL DEFAULT 0,   -- which failure, or which deferral, of the message it was
  CHECK ((worker_id IS NULL) = (kept_until IS NULL)),
  CHECK (on_wall = 0 OR worker_id IS NULL),
  PRIMARY KEY (queue, message)
) STRICT, WITHOUT ROWID;
-- What joins its line at its instant.
CREATE INDEX relet_due ON relet_retry_queue (queue, on_wall, due_at) WHERE worker_id IS NULL AND behind = 0;
CREATE INDEX relet_retry_kept ON relet_retry_queue (queue, worker_id, due_at) WHERE worker_id IS NOT NULL;
CREATE INDEX relet_retry_due  ON relet_retry_queue (queue, due_at) WHERE worker_id IS NOT NULL;
CREATE INDEX relet_retry_free ON relet_retry_queue (queue, kept_until) WHERE kept_until IS NOT NULL;

-- What is done, dead or cancelled.
CREATE TABLE relet_finished (
  message     INTEGER PRIMARY KEY,   -- relet_messages.id
  status      TEXT    NOT NULL,      -- as in relet_messages
  finished_at INTEGER NOT NULL,
  keep_until  INTEGER                -- done or cancelled: deleted from this instant on
) STRICT;
CREATE INDEX relet_ends ON relet_finished (status, finished_at);
CREATE INDEX relet_kept ON relet_finished (keep_until) WHERE keep_until IS NOT NULL;

-- The running workers: which incarnation of a label is the present one.
CREATE TABLE relet_workers (
  label       TEXT PRIMARY KEY NOT NULL,
  incarnation INTEGER NOT NULL,
  pid         INTEGER NOT NULL,      -- to be shown; nothing is judged by it
  started_at  INTEGER NOT NULL,
  lock        TEXT                   -- the file whose lock it holds while it lives, in the folder beside the store; NULL: in memory
) STRICT, WITHOUT ROWID;

-- Starts of workers that are over, of which something still looks as if it were theirs: that is cleared in steps, and the row goes
-- with the last of it.
CREATE TABLE relet_ended (
  label TEXT    NOT NULL,            -- '': all workers, with what was claimed before a restart of the machine
  dead  INTEGER NOT NULL CHECK (dead = 0 OR dead = 1),   -- 1: what it holds is void; 0: that keeps its leases, only what it deferred is anyone's
  upto  INTEGER NOT NULL,            -- every start of the label up to this incarnation; of '': every epoch before this one
  PRIMARY KEY (label, dead)
) STRICT, WITHOUT ROWID;
