//! What the tests of the promises share: a store whose clock stands still, a folder, and the last look of every test.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use relet::rusqlite::Connection;
use relet::rusqlite::types::Value;
use relet::{Claim, Clock, MessageId, Options, Snapshot, Store, Worker};

pub const SECOND: Duration = Duration::from_secs(1);
pub const HOUR: Duration = Duration::from_secs(3600);
pub const DAY: Duration = Duration::from_secs(86_400);
pub const MS: Duration = Duration::from_millis(1);

/// A store in memory, and its clock, which stands still.
pub fn memory() -> (Store, Clock) {
    memory_with(Store::options())
}

pub fn memory_with(options: Options) -> (Store, Clock) {
    let clock = Clock::manual();
    (options.clock(clock.clone()).open_in_memory().unwrap(), clock)
}

/// The message as it is now; it must be there.
pub fn row(store: &Store, id: impl Into<MessageId>) -> Snapshot {
    store.show(id).unwrap().expect("the message is there")
}

/// The next claim; there must be one.
pub fn next(worker: &Worker, queue: &str) -> Claim {
    worker.claim(queue).unwrap().expect("something can be claimed")
}

/// Everything that the tables promise is kept.
pub fn sound(store: &Store) {
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// All rows of a table, every column, in the order of its primary key.
pub fn raw(conn: &Connection, table: &str) -> Vec<Vec<Value>> {
    let mut statement = conn.prepare(&format!("SELECT * FROM {table} ORDER BY 1")).unwrap();
    let columns = statement.column_count();
    let rows = statement.query_map([], |row| (0..columns).map(|column| row.get(column)).collect()).unwrap();
    rows.collect::<Result<_, _>>().unwrap()
}

/// A folder of its own, gone with this value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("relet-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self) -> PathBuf {
        self.0.join("queue.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
