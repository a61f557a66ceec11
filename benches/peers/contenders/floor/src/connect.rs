//! A connection with its durability, and transactions on it.

use std::path::Path;
use std::time::Duration;

use driver::{Answer, brief};
use rusqlite::{Connection, Transaction, TransactionBehavior};

pub fn connect(folder: &Path, synchronous: &str, schema: &str) -> Answer<Connection> {
    let open = || {
        let conn = Connection::open(folder.join("q.db"))?;
        conn.busy_timeout(Duration::from_secs(30))?;
        conn.query_row("PRAGMA journal_mode=WAL", [], |_| Ok(()))?;
        conn.pragma_update(None, "synchronous", synchronous)?;
        conn.execute_batch(schema)?;
        conn.set_prepared_statement_cache_capacity(32);
        Ok(conn)
    };
    open().map_err(|error: rusqlite::Error| brief(error))
}

/// One BEGIN IMMEDIATE transaction.
pub fn transaction<T>(conn: &Connection, work: impl FnOnce(&Transaction) -> rusqlite::Result<T>) -> Answer<T> {
    let run = || {
        let transaction = Transaction::new_unchecked(conn, TransactionBehavior::Immediate)?;
        let done = work(&transaction)?;
        transaction.commit()?;
        Ok(done)
    };
    run().map_err(|error: rusqlite::Error| brief(error))
}
