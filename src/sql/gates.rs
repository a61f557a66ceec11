//! `relet_gates`: what may pass a valve now, and what changes that.
//!
//! A gate is asked when a message is handed out, in the same transaction, so its limits are exact for all processes. It
//! keeps no count of what has passed: that is looked up, in the leases of those that have, so that a death, an expiry or a
//! lost claim frees a slot by itself. The rate is a token bucket kept as one number, the moment at which it will be full again
//! (the generic cell rate algorithm, ITU-T I.371), in integers, so that it is exact over any time.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::clock::Now;
use crate::error::Result;
use crate::sql::{Record, Tx, ids, lines};
use crate::view::{GATE_WAITING_MAX, GateView};

/// Claims that may pass at a time when a gate opens again; each ack adds one, until there are [`WINDOW_MAX`].
const WINDOW_MIN: i64 = 1;
/// At this window the slow start is over.
const WINDOW_MAX: i64 = 32;

/// What a gate may be limited to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Limits {
    pub(crate) slots: Option<u32>,
    pub(crate) rate: Option<Rate>,
}

/// A token bucket: `count` messages in `period_ms`, evenly, and up to `burst` of them at once. In any span of `period_ms`
/// at most `count + burst - 1` pass, so that is exactly the rate where `burst` is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    pub(crate) count: u32,
    pub(crate) period_ms: i64,
    pub(crate) burst: u32,
}

/// What a gate says to the next message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    Open,
    /// It is closed: for that long.
    Closed(Duration),
    /// Its rate is used up: for that long.
    Spent(Duration),
    /// As many claims as may pass at a time have passed: until one of them ends.
    Taken,
}

struct GateRow {
    closed_until: Option<i64>,
    slots: Option<i64>,
    rate: Option<Rate>,
    full_at: i64,
    window: Option<i64>,
}

impl GateRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<GateRow> {
        Ok(GateRow {
            closed_until: row.get(0)?,
            slots: row.get(1)?,
            rate: match row.get::<_, Option<u32>>(2)? {
                Some(count) => Some(Rate { count, period_ms: row.get(3)?, burst: row.get(4)? }),
                None => None,
            },
            full_at: row.get::<_, Option<i64>>(5)?.unwrap_or(0),
            window: row.get(6)?,
        })
    }

    /// How long it stays closed.
    fn closed_for(&self, now: Now) -> Option<Duration> {
        self.closed_until.filter(|until| *until > now.time).map(|until| crate::clock::span(now.time, until))
    }
}

impl Rate {
    /// The bucket's size on its own scale, on which a message takes [`Rate::period_ms`] and a millisecond gives
    /// [`Rate::count`] back. At most a week times 1,000,000, so sums with it do not overflow.
    fn size(self) -> i64 {
        self.period_ms * i64::from(self.burst)
    }

    /// How much of the bucket is used: never more than all of it, so that no clock can stretch it. Below zero is what has come
    /// in since it was full, less than in a millisecond: the clock's steps are to lose none of a rate.
    fn used(self, full_at: i64, now: Now) -> i64 {
        // The machine was restarted, and nothing has been written since.
        if now.awake == i64::MAX {
            return self.size();
        }
        full_at.saturating_sub(self.scaled(now)).clamp(1 - i64::from(self.count), self.size())
    }

    /// When the bucket is full again, with so much of it used.
    fn full_at(self, used: i64, now: Now) -> i64 {
        self.scaled(now).saturating_add(used)
    }

    fn scaled(self, now: Now) -> i64 {
        now.awake.saturating_mul(i64::from(self.count))
    }

    /// How long it is until the bucket has room for one more message.
    fn wait(self, full_at: i64, now: Now) -> Option<Duration> {
        let lacking = self.used(full_at, now) + self.period_ms - self.size();
        let ms = lacking.max(0).unsigned_abs().div_ceil(u64::from(self.count));
        (ms > 0).then(|| Duration::from_millis(ms))
    }

    /// As long until it is full as it is until `before` is, where that much of it is used; and no longer than if it were empty.
    fn used_as(self, before: Rate, used: i64) -> i64 {
        let used = i128::from(used) * i128::from(self.count);
        let before = i128::from(before.count);
        // Rounded up: a change of the limits gives no message away.
        let used = i64::try_from((used + before - 1).div_euclid(before)).unwrap_or(i64::MAX);
        used.clamp(1 - i64::from(self.count), self.size())
    }
}

fn find(conn: &Connection, gate: i64) -> Result<Option<GateRow>> {
    const SQL: &str = "SELECT closed_until, slots, rate, period_ms, burst, full_at, window
                         FROM main.relet_gates WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([gate], GateRow::read).optional()?)
}

/// Whether a message may pass this gate now.
pub(crate) fn passage(conn: &Connection, gate: i64, now: Now) -> Result<Passage> {
    let Some(row) = find(conn, gate)? else { return Ok(Passage::Open) };
    if let Some(left) = row.closed_for(now) {
        return Ok(Passage::Closed(left));
    }
    // Those that had passed before it was closed say nothing about how it is now.
    let opened_at = row.closed_until.unwrap_or(0);
    for (most, since) in [(row.slots, 0), (row.window, opened_at)] {
        if let Some(most) = most
            && held(conn, gate, now, since, most)? >= most
        {
            return Ok(Passage::Taken);
        }
    }
    Ok(match row.rate.and_then(|rate| rate.wait(row.full_at, now)) {
        Some(wait) => Passage::Spent(wait),
        None => Passage::Open,
    })
}

/// Claims that have passed this gate since an instant and hold, counted up to `most`.
fn held(conn: &Connection, gate: i64, now: Now, since: i64, most: i64) -> Result<i64> {
    const SQL: &str = "SELECT count(*) FROM (
                         SELECT 1 FROM main.relet_passed p CROSS JOIN main.relet_messages m ON m.id = p.message
                          WHERE p.gate = ?1 AND m.line = -1 AND m.place > ?2 AND m.claimed_at >= ?3 LIMIT ?4)";
    Ok(conn.prepare_cached(SQL)?.query_row(params![gate, now.awake, since, most], |row| row.get(0))?)
}

/// So many claims that are over are stepped over when those that hold are counted.
const OVER_MAX: i64 = 100;

/// Claims that have passed this gate and are over, and have not been taken back: of a queue that nobody serves, say. Only where
/// there are so many that counting those that hold takes long; up to `limit`.
pub(crate) fn over(conn: &Connection, gate: i64, now: Now, limit: i64) -> Result<Vec<i64>> {
    const MANY: &str = "SELECT EXISTS (SELECT 1 FROM main.relet_passed WHERE gate = ?1 LIMIT 1 OFFSET ?2)";
    const SQL: &str = "SELECT message FROM (
                         SELECT p.message, m.line = -1 AND m.place > ?2 AS holds
                           FROM main.relet_passed p CROSS JOIN main.relet_messages m ON m.id = p.message
                          WHERE p.gate = ?1 LIMIT ?3)
                        WHERE holds IS NOT 1 LIMIT ?4";
    let Some(row) = find(conn, gate)? else { return Ok(Vec::new()) };
    let Some(most) = row.slots.into_iter().chain(row.window).min() else { return Ok(Vec::new()) };
    let most = most.saturating_add(OVER_MAX);
    if !conn.prepare_cached(MANY)?.query_row([gate, most], |row| row.get(0))? {
        return Ok(Vec::new());
    }
    ids(conn, SQL, params![gate, now.awake, most.saturating_add(limit), limit])
}

/// A message passes: its rate is charged for it, and it counts as long as its lease runs.
pub(crate) fn pass(tx: &Tx<'_>, gate: i64, message: i64) -> Result<()> {
    const PASSED: &str = "INSERT OR IGNORE INTO main.relet_passed (gate, message) VALUES (?1, ?2)";
    const CHARGE: &str = "UPDATE main.relet_gates SET full_at = ?2 WHERE id = ?1";
    tx.conn.prepare_cached(PASSED)?.execute([gate, message])?;
    let Some(row) = find(tx.conn, gate)? else { return Ok(()) };
    if let Some(rate) = row.rate {
        let used = rate.used(row.full_at, tx.now) + rate.period_ms;
        tx.conn.prepare_cached(CHARGE)?.execute(params![gate, rate.full_at(used, tx.now)])?;
    }
    Ok(())
}

/// The claim of what has passed has ended.
pub(crate) fn leave(conn: &Connection, record: &Record) -> Result<()> {
    record.gate.map_or(Ok(()), |gate| forget(conn, gate, record.id))
}

/// Nothing of this message has passed this gate.
pub(crate) fn forget(conn: &Connection, gate: i64, message: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_passed WHERE gate = ?1 AND message = ?2";
    conn.prepare_cached(SQL)?.execute([gate, message])?;
    Ok(())
}

/// What has passed was acked: one more may pass at a time, if it had passed since the gate was closed.
pub(crate) fn widen(tx: &Tx<'_>, record: &Record) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_gates SET window = CASE WHEN window < ?2 THEN window + 1 END
                        WHERE id = ?1 AND window IS NOT NULL AND ifnull(closed_until, 0) <= ?3";
    if let Some(gate) = record.gate {
        tx.conn.prepare_cached(SQL)?.execute(params![gate, WINDOW_MAX, record.claimed_at])?;
    }
    Ok(())
}

/// The gate of this name, made where there is none: open, without limits.
pub(crate) fn find_or_make(tx: &Tx<'_>, name: &str) -> Result<i64> {
    const SQL: &str = "INSERT INTO main.relet_gates (name) VALUES (?1)";
    match id_of(tx.conn, name)? {
        Some(id) => Ok(id),
        None => Ok(tx.conn.prepare_cached(SQL)?.insert([name])?),
    }
}

fn id_of(conn: &Connection, name: &str) -> Result<Option<i64>> {
    const SQL: &str = "SELECT id FROM main.relet_gates WHERE name = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([name], |row| row.get(0)).optional()?)
}

pub(crate) fn name_of(conn: &Connection, gate: i64) -> Result<String> {
    const SQL: &str = "SELECT name FROM main.relet_gates WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([gate], |row| row.get(0)).optional()?.unwrap_or_default())
}

/// Closes a gate until this instant, or longer where it is closed for longer already.
pub(crate) fn close(tx: &Tx<'_>, gate: i64, until: i64) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_gates SET closed_until = max(ifnull(closed_until, 0), ?2), closed_at = ?3, window = ?4 WHERE id = ?1";
    tx.conn.prepare_cached(SQL)?.execute(params![gate, until, tx.now.time, WINDOW_MIN])?;
    Ok(())
}

/// Opens a closed gate now; gently, as it would have opened by itself.
pub(crate) fn open(tx: &Tx<'_>, gate: i64) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_gates SET closed_until = ?2 WHERE id = ?1 AND closed_until > ?2";
    tx.conn.prepare_cached(SQL)?.execute([gate, tx.now.time])?;
    Ok(())
}

/// Limits a gate, in place of the limits it had. A rate begins with a full bucket; one that was limited before keeps its fill.
pub(crate) fn limit(tx: &Tx<'_>, gate: i64, limits: Limits) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_gates
                          SET slots = ?2, rate = ?3, period_ms = ?4, burst = ?5, full_at = ?6 WHERE id = ?1";
    let before = find(tx.conn, gate)?.and_then(|row| row.rate.map(|rate| (rate, row.full_at)));
    let full_at = limits.rate.map(|rate| {
        let used = before.map_or(0, |(old, full_at)| rate.used_as(old, old.used(full_at, tx.now)));
        rate.full_at(used, tx.now)
    });
    let rate = limits.rate;
    tx.conn.prepare_cached(SQL)?.execute(params![
        gate,
        limits.slots,
        rate.map(|rate| rate.count),
        rate.map(|rate| rate.period_ms),
        rate.map(|rate| rate.burst),
        full_at,
    ])?;
    Ok(())
}

/// The machine was restarted: what passed before is not known to be long ago, so every bucket starts empty.
pub(crate) fn empty_all(conn: &Connection, now: Now) -> Result<()> {
    // Bounded, since SQLite makes a sum that overflows a REAL, which the column does not take.
    const SQL: &str = "UPDATE main.relet_gates
                          SET full_at = min(?1, (?2 - period_ms * burst) / rate) * rate + period_ms * burst
                        WHERE rate IS NOT NULL";
    conn.prepare_cached(SQL)?.execute([now.awake, i64::MAX])?;
    Ok(())
}

/// How long it is until one of the gates that this queue's messages wait behind lets something pass by itself.
pub(crate) fn next_opening(conn: &Connection, queue: i64, now: Now) -> Result<Option<Duration>> {
    let mut next = None;
    for line in lines::gated(conn, queue)? {
        if let Some(gate) = line.gate
            && let Passage::Closed(wait) | Passage::Spent(wait) = passage(conn, gate, now)?
        {
            next = next.into_iter().chain([wait]).min();
        }
    }
    Ok(next)
}

/// Every gate, by name.
pub(crate) fn all(conn: &Connection, now: Now) -> Result<Vec<GateView>> {
    const SQL: &str = "SELECT closed_until, slots, rate, period_ms, burst, full_at, window, name,
        (SELECT count(*) FROM (
           SELECT 1 FROM main.relet_passed p CROSS JOIN main.relet_messages m ON m.id = p.message
            WHERE p.gate = g.id AND m.line = -1 AND m.place > ?1 LIMIT ?2)),
        (SELECT ifnull(sum((SELECT count(*) FROM (
           SELECT 1 FROM main.relet_messages m INDEXED BY relet_lines
            WHERE m.queue = q.id AND m.line >= 4 * g.id AND m.line < 4 * g.id + 4 LIMIT ?2))), 0) FROM main.relet_queues q)
        FROM main.relet_gates g ORDER BY name";
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map(params![now.awake, GATE_WAITING_MAX as i64], |row| {
        let gate = GateRow::read(row)?;
        let left = gate.closed_for(now);
        Ok(GateView {
            name: row.get(7)?,
            closed_until: left.map(|left| now.shown(now.after(left))),
            concurrency: gate.slots.and_then(|slots| u32::try_from(slots).ok()),
            rate: gate.rate.map(|rate| (rate.count, Duration::from_millis(rate.period_ms.unsigned_abs()))),
            burst: gate.rate.map(|rate| rate.burst),
            slow_start: gate.window.and_then(|window| u32::try_from(window).ok()),
            held: row.get::<_, i64>(8)?.unsigned_abs(),
            waiting: row.get::<_, i64>(9)?.unsigned_abs(),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::INSTANT_MAX;
    use crate::sql::meta;

    const WEEK_MS: i64 = 7 * 86_400_000;

    fn at(awake: i64) -> Now {
        Now::of(0, awake)
    }

    /// Rates at every end of what is accepted, at every moment that a clock can show: a minute after the boot, now where
    /// leases run on the wall clock, and the last instant of all.
    fn extremes() -> impl Iterator<Item = (Rate, i64)> {
        let ends = |low: i64, high: i64| [low, high];
        ends(1, 1_000_000).into_iter().flat_map(move |count| {
            ends(1, WEEK_MS).into_iter().flat_map(move |period_ms| {
                ends(1, 1_000_000).into_iter().flat_map(move |burst| {
                    let rate = Rate { count: count as u32, period_ms, burst: burst as u32 };
                    [0, 60_000, 1_800_000_000_000, INSTANT_MAX, i64::MAX].map(|awake| (rate, awake))
                })
            })
        })
    }

    #[test]
    fn no_rate_and_no_clock_overflows() {
        for (rate, awake) in extremes() {
            for full_at in [i64::MIN, 0, i64::MAX] {
                let used = rate.used(full_at, at(awake));
                assert!((1 - i64::from(rate.count)..=rate.size()).contains(&used), "{rate:?} at {awake}: {used}");
                let charged = rate.full_at(used + rate.period_ms, at(awake));
                assert!(rate.wait(charged, at(awake)).is_none_or(|wait| wait <= Duration::from_secs(7 * 86_400)));
                for (other, _) in extremes() {
                    let used = other.used_as(rate, used);
                    assert!((1 - i64::from(other.count)..=other.size()).contains(&used), "{rate:?} becomes {other:?}");
                }
            }
        }
    }

    /// A full bucket gives its burst at once, and then one message each `period / count`, rounded up to a millisecond.
    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        for (rate, awake) in extremes().filter(|(rate, awake)| rate.burst == 1 && *awake <= 1_800_000_000_000) {
            let full_at = rate.full_at(0, at(awake));
            assert_eq!(rate.wait(full_at, at(awake)), None, "{rate:?} at {awake}");
            let charged = rate.full_at(rate.period_ms, at(awake));
            let wait = rate.period_ms.unsigned_abs().div_ceil(u64::from(rate.count));
            assert_eq!(rate.wait(charged, at(awake)), Some(Duration::from_millis(wait)), "{rate:?} at {awake}");
            let later = at(awake + wait as i64);
            assert_eq!(rate.wait(charged, later), None, "{rate:?} at {awake}");
        }
    }

    #[test]
    fn what_is_used_of_a_bucket_lasts_as_long_under_another_rate() {
        let slow = Rate { count: 1, period_ms: 1_000, burst: 10 };
        let fast = Rate { count: 7, period_ms: 1_000, burst: 100 };
        assert_eq!(fast.used_as(slow, 3_000), 21_000);
        assert_eq!(slow.used_as(fast, 21_000), 3_000);
        assert_eq!(slow.used_as(fast, 21_001), 3_001, "rounded up");
        assert_eq!(slow.used_as(slow, 1), 1);
        assert_eq!(slow.used_as(fast, fast.size()), slow.size(), "no longer than if it were empty");
    }

    /// After a restart of the machine, also where the numbers would overflow: SQLite's arithmetic is the same.
    #[test]
    fn every_bucket_starts_empty_after_a_boot() {
        let conn = Connection::open_in_memory().unwrap();
        meta::create(&conn).unwrap();
        for (rate, awake) in extremes().filter(|(_, awake)| *awake < i64::MAX) {
            conn.execute("DELETE FROM main.relet_gates", []).unwrap();
            conn.execute(
                "INSERT INTO main.relet_gates (id, name, rate, period_ms, burst, full_at) VALUES (1, 'g', ?1, ?2, ?3, 0)",
                params![rate.count, rate.period_ms, rate.burst],
            )
            .unwrap();
            empty_all(&conn, at(awake)).unwrap();
            let full_at = find(&conn, 1).unwrap().unwrap().full_at;
            if rate.scaled(at(awake)) < i64::MAX {
                assert_eq!(rate.used(full_at, at(awake)), rate.size(), "{rate:?} at {awake}");
            }
        }
    }
}
