//! The budget: how much clearing one transaction may do.
//!
//! Whoever claims first clears the way: what has become due joins its line, void claims are taken back, what has expired is given up.
//! All operations of a transaction share one budget for that, by count and by time, since the write lock is held for the
//! sum of it. What finds it spent leaves the rest to the next transaction, and says so.

use std::time::Duration;

use crate::clock::Stopwatch;

/// Rows that one transaction clears at most.
pub(crate) const ROWS: usize = 1000;
/// And for how long, from the first of them on: a slow disk, or rows with much beside them, end it sooner.
const TIME: Duration = Duration::from_millis(20);
/// Items of one bulk call (claims, settles) that each transaction has room for, whatever the others in it have used up.
pub(crate) const ITEMS: usize = 16;

#[derive(Debug)]
pub(crate) struct Budget {
    rows: usize,
    /// `None`: without end.
    time: Option<Duration>,
    /// Runs since the first row.
    watch: Option<Stopwatch>,
}

impl Budget {
    pub(crate) fn new() -> Budget {
        // What unit tests count does not depend on the machine's speed.
        let time = if cfg!(test) { None } else { Some(TIME) };
        Budget { rows: ROWS, time, watch: None }
    }

    /// By count alone, so that a test does not depend on the machine's speed.
    #[cfg(test)]
    pub(crate) fn of_rows(rows: usize) -> Budget {
        Budget { rows, time: None, watch: None }
    }

    /// Takes a row out of it; `false` if it is spent.
    pub(crate) fn take(&mut self) -> bool {
        if self.left() == 0 {
            return false;
        }
        self.spend(1);
        true
    }

    /// Takes so many rows out of it, or what is left.
    pub(crate) fn spend(&mut self, rows: usize) {
        self.watch.get_or_insert_with(Stopwatch::start);
        self.rows = self.rows.saturating_sub(rows);
    }

    /// Rows that are left.
    pub(crate) fn left(&self) -> usize {
        let is_over = self.time.is_some_and(|time| self.watch.is_some_and(|watch| watch.elapsed() >= time));
        if is_over { 0 } else { self.rows }
    }

    /// Whether a bulk call that has done so many items in this transaction may do one more.
    pub(crate) fn has_room(&mut self, done: usize) -> bool {
        done < ITEMS || self.take()
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;
    use crate::clock::Now;
    use crate::db;
    use crate::message::Message;
    use crate::options::Options;
    use crate::sql::claim::{self, Routes, Who};
    use crate::sql::record::Large;
    use crate::sql::settle::{self, Known, Settle};
    use crate::sql::{Defaults, Tx, enqueue};

    const COUNT: usize = 250;
    const BUDGET: usize = 40;
    const SECOND: Duration = Duration::from_secs(1);

    /// Something that is cleared by claims.
    struct Kind {
        name: &'static str,
        message: fn() -> Message,
        /// What becomes of each message before the time comes: it is claimed by `theirs`, and settled so.
        claimed: Option<Option<Settle>>,
        /// How many are still to be cleared.
        left: &'static str,
        /// How many can be claimed in the end.
        alive: usize,
    }

    fn kinds() -> [Kind; 4] {
        let (plain, held) = (|| Message::new("m"), "SELECT count(*) FROM relet_messages WHERE worker_id = 'theirs'");
        let deferred = Settle::Defer { delay: Duration::ZERO, reason: "later".into() };
        [
            Kind {
                name: "due",
                message: || Message::new("m").delay(SECOND),
                claimed: None,
                left: "SELECT count(*) FROM relet_retry_queue",
                alive: COUNT,
            },
            Kind { name: "void", message: plain, claimed: Some(None), left: held, alive: COUNT },
            Kind { name: "abandoned", message: plain, claimed: Some(Some(deferred)), left: held, alive: COUNT },
            Kind {
                name: "expired",
                message: || Message::new("m").ttl(SECOND),
                claimed: None,
                left: "SELECT count(*) FROM relet_expiry",
                alive: 0,
            },
        ]
    }

    fn who(label: &str) -> Who {
        let (routes, lease) = (Routes::ALL, Some(SECOND));
        Who { label: label.into(), incarnation: 0, routes, lease, crashed: true, large: Large::Read }
    }

    fn transaction<T>(conn: &Connection, awake: i64, rows: usize, run: impl FnOnce(&mut Tx<'_>) -> T) -> T {
        let now = Now::of(1_000_000 + awake, awake);
        let mut tx = Tx::new(conn, now, Defaults::from(&Options::default()), 1, 0);
        tx.budget = Budget::of_rows(rows);
        conn.execute_batch("BEGIN IMMEDIATE").unwrap();
        let value = run(&mut tx);
        tx.finish().unwrap();
        conn.execute_batch("COMMIT").unwrap();
        value
    }

    fn prepare(kind: &Kind) -> Connection {
        let conn = db::open_in_memory(&Options::default()).unwrap().conn;
        transaction(&conn, 1, usize::MAX, |tx| {
            for _ in 0..COUNT {
                enqueue::enqueue(tx, "q", &(kind.message)()).unwrap();
            }
            if let Some(how) = &kind.claimed {
                for taken in claim::claim_next(tx, "q", &who("theirs"), COUNT).unwrap().taken {
                    if let Some(how) = how {
                        settle::settle(tx, taken.receipt, how, Known::default()).unwrap();
                    }
                }
            }
        });
        conn
    }

    /// However many claim in one transaction, together they clear no more than one budget; what they clear is handed out only when
    /// nothing is left that might come before it; and each transaction clears as much as it may, so that the whole is linear.
    #[test]
    fn all_claims_of_a_transaction_clear_no_more_than_one_budget() {
        for kind in kinds() {
            let conn = prepare(&kind);
            let left = || conn.query_row(kind.left, [], |row| row.get::<_, u32>(0)).unwrap() as usize;
            let mut transactions = 0;
            while left() > 0 {
                let before = left();
                let taken = transaction(&conn, 3_600_000, BUDGET, |tx| {
                    let claims = (0..5).map(|_| claim::claim_next(tx, "q", &who("mine"), 1).unwrap());
                    claims.filter(|next| !next.taken.is_empty()).count()
                });
                let cleared = before - left();
                assert!(cleared <= BUDGET, "{}: {cleared}", kind.name);
                assert!(cleared == BUDGET || left() == 0, "{}: {cleared} of {before}", kind.name);
                assert!(taken == 0 || left() == 0, "{}: handed out past {} that may come first", kind.name, left());
                transactions += 1;
            }
            assert_eq!(transactions, COUNT.div_ceil(BUDGET), "{}", kind.name);
            let mut ids = Vec::new();
            transaction(&conn, 3_600_000, usize::MAX, |tx| {
                while let Some(taken) = claim::claim_next(tx, "q", &who("mine"), 1).unwrap().taken.pop() {
                    ids.push(taken.record.id);
                }
            });
            assert!(ids.is_sorted() && ids.len() + 5 >= kind.alive, "{}: {ids:?}", kind.name);
        }
    }

    /// A bulk call shares the budget, too: claims of many, above all.
    #[test]
    fn a_bulk_claim_ends_with_the_budget_and_goes_on_in_the_next_transaction() {
        let conn = prepare(&Kind { claimed: None, ..kinds().into_iter().nth(1).unwrap() });
        let mut taken = 0;
        while taken < COUNT {
            let counts = transaction(&conn, 1, BUDGET, |tx| {
                [0; 3].map(|_| {
                    let next = claim::claim_next(tx, "q", &who("mine"), COUNT).unwrap();
                    (next.taken.len(), next.again)
                })
            });
            let sum: usize = counts.iter().map(|(count, _)| count).sum();
            taken += sum;
            assert!(sum <= BUDGET + 3 * ITEMS, "{counts:?}");
            assert!(taken == COUNT || counts.iter().all(|(count, again)| *count >= ITEMS && *again), "{counts:?}");
        }
        assert_eq!(taken, COUNT);
    }
}
