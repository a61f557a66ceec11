//! The floor: a table of id, status and payload with one index, and nothing that makes a queue safe.

use std::path::Path;

use parking_lot::Mutex;
use relet::Durability;
use relet::rusqlite::{Connection, Result};

use super::{PAYLOAD, Side, connect, transaction};

const SCHEMA: &str = "
    CREATE TABLE bare (id INTEGER PRIMARY KEY, status TEXT NOT NULL, payload BLOB NOT NULL) STRICT;
    CREATE INDEX bare_status ON bare (status, id)";

/// One connection behind a mutex; one transaction an operation.
pub struct Bare(Mutex<Connection>);

impl Bare {
    pub fn open(path: &Path, durability: Durability) -> Bare {
        let conn = connect(path, durability);
        conn.execute_batch(SCHEMA).expect("the schema runs");
        Bare(Mutex::new(conn))
    }

    pub fn with(&self, look: impl FnOnce(&Connection)) {
        look(&self.0.lock());
    }

    /// Ends a claim and makes the next one, in one commit.
    pub fn step(&self, id: i64) -> i64 {
        self.transaction(|conn| {
            delete(conn, id)?;
            take(conn)
        })
    }

    fn transaction<T>(&self, work: impl FnOnce(&Connection) -> Result<T>) -> T {
        transaction(&self.0.lock(), work)
    }
}

impl Side for Bare {
    type Claim = i64;

    fn enqueue(&self) {
        self.transaction(insert);
    }

    fn claim(&self) -> i64 {
        self.transaction(take)
    }

    fn ack(&self, id: i64) {
        self.transaction(|conn| delete(conn, id));
    }

    fn enqueue_many(&self, count: usize) {
        self.transaction(|conn| (0..count).try_for_each(|_| insert(conn)));
    }

    fn claim_many(&self, count: usize) -> Vec<i64> {
        self.transaction(|conn| (0..count).map(|_| take(conn)).collect())
    }

    fn ack_many(&self, ids: Vec<i64>) {
        self.transaction(|conn| ids.into_iter().try_for_each(|id| delete(conn, id)));
    }
}

fn insert(conn: &Connection) -> Result<()> {
    conn.prepare_cached("INSERT INTO bare (status, payload) VALUES ('pending', ?1)")?.execute([PAYLOAD])?;
    Ok(())
}

fn take(conn: &Connection) -> Result<i64> {
    const SELECT: &str = "SELECT id, payload FROM bare WHERE status = 'pending' ORDER BY id LIMIT 1";
    const UPDATE: &str = "UPDATE bare SET status = 'processing' WHERE id = ?1";
    let (id, _payload): (i64, Vec<u8>) =
        conn.prepare_cached(SELECT)?.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    conn.prepare_cached(UPDATE)?.execute([id])?;
    Ok(id)
}

fn delete(conn: &Connection, id: i64) -> Result<()> {
    assert_eq!(conn.prepare_cached("DELETE FROM bare WHERE id = ?1 AND status = 'processing'")?.execute([id])?, 1);
    Ok(())
}
