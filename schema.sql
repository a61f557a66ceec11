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
-- Instants (…_at) are unix milliseconds, UTC. lease_until alone is in milliseconds of the clock that leases run on:
-- the time this machine has been awake since its boot (relet_meta: boot_id), or the wall clock where there is no such clock.

-- What is true of the whole store, a row each.
CREATE TABLE relet_meta (
  key   TEXT PRIMARY KEY NOT NULL,
  value ANY                          -- schema_version, store_id, epoch, boot_id, boot_mark, incarnation, touched, owned
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
  paused_until  INTEGER,             -- nothing is handed out before this instant
  paused_at     INTEGER,             -- when that was set, so that a clock set back cannot stretch it; 0: until it is resumed
  -- Counters, kept in the transaction that changes the rows, so that stats cost the same at any size.
  pending       INTEGER NOT NULL DEFAULT 0 CHECK (pending >= 0),
  routing       INTEGER NOT NULL DEFAULT 0 CHECK (routing >= 0),
  queued        INTEGER NOT NULL DEFAULT 0 CHECK (queued >= 0),
  pending_local INTEGER NOT NULL DEFAULT 0 CHECK (pending_local >= 0),
  processing    INTEGER NOT NULL DEFAULT 0 CHECK (processing >= 0),
  done          INTEGER NOT NULL DEFAULT 0 CHECK (done >= 0),
  dead          INTEGER NOT NULL DEFAULT 0 CHECK (dead >= 0),
  cancelled     INTEGER NOT NULL DEFAULT 0 CHECK (cancelled >= 0),
  retrying      INTEGER NOT NULL DEFAULT 0 CHECK (retrying >= 0),   -- rows of relet_retry_queue
  acked         INTEGER NOT NULL DEFAULT 0,                         -- messages ever acked, deleted ones too
  CHECK ((paused_until IS NULL) = (paused_at IS NULL))
) STRICT;
CREATE INDEX relet_paused ON relet_queues (paused_at) WHERE paused_at IS NOT NULL;

-- Named valves. A closed one moves no rows: what waits behind it stays in a line of its own in relet_gated.
CREATE TABLE relet_gates (
  id           INTEGER PRIMARY KEY,
  name         TEXT    NOT NULL UNIQUE,
  closed_until INTEGER,              -- nothing passes before this instant
  closed_at    INTEGER,              -- when that was set, so that a clock set back cannot stretch it; 0: until it is opened
  slots        INTEGER CHECK (slots > 0),   -- concurrency: at most so many claims through it at a time; NULL: any number
  rate         INTEGER,              -- at most so many messages …
  period_ms    INTEGER,              -- … in any such span of time
  burst        INTEGER,              -- and so many of them at once
  full_at      INTEGER,              -- when the bucket is full again, in milliseconds of the leases' clock, times rate
  window       INTEGER CHECK (window > 0),  -- slow start after it was closed: at most so many at a time; NULL: that is over
  CHECK ((closed_until IS NULL) = (closed_at IS NULL)),
  CHECK ((rate IS NULL) = (period_ms IS NULL)),
  CHECK ((rate IS NULL) = (burst IS NULL)),
  CHECK ((rate IS NULL) = (full_at IS NULL)),
  CHECK (rate > 0 AND period_ms > 0 AND burst > 0)
) STRICT;
CREATE INDEX relet_closed ON relet_gates (closed_at) WHERE closed_at IS NOT NULL;

-- Recurring enqueues. The tick and its message are one commit.
CREATE TABLE relet_schedules (
  name      TEXT    PRIMARY KEY NOT NULL,
  queue     TEXT    NOT NULL,        -- name of the queue
  every_ms  INTEGER CHECK (every_ms > 0),   -- a tick each time this span has passed; or
  cron      TEXT,                    -- a tick whenever this cron expression says so,
  time_zone TEXT,                    -- in this IANA time zone
  catch_up  INTEGER NOT NULL CHECK (catch_up >= 0),   -- of ticks that were missed, at most so many are made up for, the latest ones
  next_at   INTEGER NOT NULL,        -- instant of the next tick
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

-- No list of more than two constants (x IN ('a', 'b', 'c')) in these CHECKs: SQLite would build it as a temporary b-tree at
-- every run of a statement, 4 µs each. A list that names a column is compared in place.
CREATE TABLE relet_messages (
  id            INTEGER PRIMARY KEY AUTOINCREMENT,   -- never reused
  queue         INTEGER NOT NULL,                    -- relet_queues.id
  status        TEXT    NOT NULL CHECK (status IN (route, 'processing', 'done', 'dead', 'cancelled')),
  route         TEXT    NOT NULL CHECK (route = 'pending' OR route = 'routing' OR route = 'queued' OR route = 'pending_local'),  -- the status it has when nobody holds it
  priority      INTEGER NOT NULL,                    -- higher first
  waits_for     TEXT    CHECK (waits_for IN ('due', 'group')),   -- the one thing it is parked under; NULL: nothing
  due_at        INTEGER,                             -- not before this instant
  parked_at     INTEGER,                             -- when a relative due_at was set, so that a clock set back cannot stretch the wait
  expires_at    INTEGER,                             -- time to live: not handed out from this instant on
  key           TEXT,                                -- deduplication: one live message per queue and key
  gate          INTEGER,                             -- relet_gates.id: the valve it passes when it is handed out
  tick_at       INTEGER,                             -- the tick of a schedule that it was enqueued for
  group_key     TEXT,                                -- messages of a group are handed out in order, one at a time
  worker_id     TEXT,                                -- label of the worker that holds it, or keeps it while it is deferred
  incarnation   INTEGER,                             -- which start of that worker; 0: detached (a command line)
  lease_until   INTEGER,                             -- the claim holds until then; NULL: no valid receipt (deferred)
  lease_ms      INTEGER,                             -- length of that lease
  claimed_at    INTEGER,                             -- when the claim was made
  token         INTEGER NOT NULL DEFAULT 0,          -- the newest receipt's token; only grows
  epoch         INTEGER NOT NULL DEFAULT 0,          -- the store's epoch when that token was issued
  attempts      INTEGER NOT NULL DEFAULT 0 CHECK (attempts >= 0),
  crashes       INTEGER NOT NULL DEFAULT 0,
  deferrals     INTEGER NOT NULL DEFAULT 0,
  releases      INTEGER NOT NULL DEFAULT 0,
  redrives      INTEGER NOT NULL DEFAULT 0,          -- how often it was taken back out of the dead letters
  max_attempts  INTEGER NOT NULL,
  max_deferrals INTEGER NOT NULL,
  retry         TEXT,                                -- its own backoff policy as JSON; NULL: the queue's
  last_error    TEXT,                                -- of the last fail or reject
  dead_reason   TEXT,                                -- which budget was spent, or why it was given up
  enqueued_at   INTEGER NOT NULL,
  finished_at   INTEGER,
  keep_until    INTEGER,                             -- done or cancelled: deleted from this instant on
  payload_crc   INTEGER NOT NULL,                    -- CRC-32 of the payload, checked when it is claimed
  payload_bytes INTEGER NOT NULL,
  payload       BLOB,                                -- NULL: too large to be rewritten at each claim, see relet_payloads
  CHECK ((status = 'processing') = (worker_id IS NOT NULL)),
  CHECK ((worker_id IS NULL) = (incarnation IS NULL)),
  CHECK ((lease_until IS NULL) = (lease_ms IS NULL)),
  CHECK (lease_until IS NULL OR status = 'processing'),
  CHECK (status <> 'processing' OR lease_until IS NOT NULL OR due_at IS NOT NULL),   -- held, or deferred until due
  CHECK ((status = route OR status = 'processing') = (finished_at IS NULL)),
  CHECK ((status IN ('done', 'cancelled')) = (keep_until IS NOT NULL)),
  CHECK (waits_for IS NULL OR (worker_id IS NULL AND finished_at IS NULL)),
  CHECK (waits_for IS NOT 'due' OR due_at IS NOT NULL),
  CHECK (waits_for IS NOT 'group' OR group_key IS NOT NULL)
) STRICT;

-- What can be claimed now, and nothing else: a claim is one seek, whatever else lies in the file.
CREATE INDEX relet_ready ON relet_messages (queue, status, priority DESC, id)
  WHERE worker_id IS NULL AND waits_for IS NULL AND finished_at IS NULL AND gate IS NULL;
-- The same for what must pass a gate, each gate's line by itself: a closed one is stepped over, however long it is.
CREATE INDEX relet_gated ON relet_messages (queue, gate, status, priority DESC, id)
  WHERE gate IS NOT NULL AND worker_id IS NULL AND waits_for IS NULL AND finished_at IS NULL;
-- What is held and has passed a gate, by the end of its lease.
CREATE INDEX relet_passed ON relet_messages (gate, lease_until) WHERE gate IS NOT NULL AND lease_until IS NOT NULL;
-- What waits for an instant.
CREATE INDEX relet_due ON relet_messages (queue, due_at) WHERE waits_for = 'due';
-- Waits that were set as a span of time: found again when the wall clock turns out to have been set back.
CREATE INDEX relet_parked ON relet_messages (parked_at) WHERE parked_at IS NOT NULL;
-- What is held, by the end of its lease.
CREATE INDEX relet_leases ON relet_messages (queue, lease_until) WHERE lease_until IS NOT NULL;
CREATE UNIQUE INDEX relet_keys ON relet_messages (queue, key) WHERE key IS NOT NULL AND finished_at IS NULL;
CREATE INDEX relet_groups ON relet_messages (queue, group_key, id) WHERE group_key IS NOT NULL AND finished_at IS NULL;
-- A group's turn: at most one live member is not parked behind another.
CREATE UNIQUE INDEX relet_turns ON relet_messages (queue, group_key)
  WHERE group_key IS NOT NULL AND finished_at IS NULL AND waits_for IS NOT 'group';
CREATE INDEX relet_finished ON relet_messages (status, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX relet_kept ON relet_messages (keep_until) WHERE keep_until IS NOT NULL;
CREATE INDEX relet_expiry ON relet_messages (expires_at)
  WHERE expires_at IS NOT NULL AND worker_id IS NULL AND finished_at IS NULL;

-- Payloads above 2,048 bytes: a claim or a retry rewrites the message's row, not these.
CREATE TABLE relet_payloads (
  message INTEGER PRIMARY KEY,       -- relet_messages.id
  payload BLOB NOT NULL
) STRICT;

-- The messages whose next try is set for later.
CREATE TABLE relet_retry_queue (
  message   INTEGER PRIMARY KEY,     -- relet_messages.id
  queue     INTEGER NOT NULL,
  worker_id TEXT,                    -- deferred: the worker it is kept for; NULL: failed, for anyone
  due_at    INTEGER NOT NULL,
  kept_until INTEGER,                -- deferred: from this instant on, anyone may take it
  reason    TEXT    NOT NULL,
  count     INTEGER NOT NULL,        -- which failure, or which deferral, of the message it was
  CHECK ((worker_id IS NULL) = (kept_until IS NULL))
) STRICT;
CREATE INDEX relet_retry_kept ON relet_retry_queue (queue, worker_id, due_at) WHERE worker_id IS NOT NULL;
CREATE INDEX relet_retry_due  ON relet_retry_queue (queue, due_at) WHERE worker_id IS NOT NULL;
CREATE INDEX relet_retry_free ON relet_retry_queue (queue, kept_until) WHERE kept_until IS NOT NULL;

-- The running workers: which incarnation of a label is the present one.
CREATE TABLE relet_workers (
  label       TEXT PRIMARY KEY NOT NULL,
  incarnation INTEGER NOT NULL,
  pid         INTEGER NOT NULL,      -- to be shown; nothing is judged by it
  started_at  INTEGER NOT NULL,
  lock        TEXT                   -- the file whose lock it holds while it lives, in the folder beside the store; NULL: in memory
) STRICT;
