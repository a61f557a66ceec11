//! fang, async on SQLite: claim and ack as its worker does them, one task at a time.
//!
//! It hands one task to two workers when both ask at once: what was handed out twice is an error in the row of W4.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, runtime, spy, unable};
use fang::{AsyncQueue, AsyncQueueable, AsyncRunnable, FangError, Task};
use rusqlite::{Connection, params};

/// Of its own migration, which the crate does not run by itself without another feature and another library.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS fang_tasks (
        id BLOB NOT NULL PRIMARY KEY,
        metadata TEXT NOT NULL,
        error_message TEXT,
        state TEXT CHECK (state IN ('new', 'in_progress', 'failed', 'finished', 'retried')) NOT NULL DEFAULT 'new',
        task_type TEXT NOT NULL DEFAULT 'common',
        uniq_hash CHAR(64),
        retries INTEGER NOT NULL DEFAULT 0,
        scheduled_at INTEGER NOT NULL DEFAULT (unixepoch('now')),
        created_at INTEGER NOT NULL DEFAULT (unixepoch('now')),
        updated_at INTEGER NOT NULL DEFAULT (unixepoch('now'))
    );
    CREATE INDEX IF NOT EXISTS fang_tasks_state_index ON fang_tasks (state);
    CREATE INDEX IF NOT EXISTS fang_tasks_type_index ON fang_tasks (task_type);
    CREATE INDEX IF NOT EXISTS fang_tasks_scheduled_at_index ON fang_tasks (scheduled_at);
    CREATE INDEX IF NOT EXISTS fang_tasks_uniq_hash ON fang_tasks (uniq_hash)";

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    // It says nothing of journal_mode and synchronous: SQLite's defaults.
    for (class, setting, wal, forced) in [
        (FULL, "default: DELETE", false, None),
        (FULL, "WAL set beforehand", true, None),
        (NORMAL, "forced", true, Some("NORMAL")),
    ] {
        contenders.push(Contender {
            peer: "fang",
            class,
            setting,
            crew: false,
            open: Box::new(move |path| {
                spy::force(forced);
                Ok(Arc::new(Opened::open(path, wal)?))
            }),
            settings: spy::settings,
            lacks: &[
                ("W5", "no batches"),
                ("W6 at 1000000", "a claim takes seconds at 100,000 already"),
                ("W6 behind gated", "no gates"),
                ("W7", "its workers poll"),
            ],
        });
    }
    driver::run(contenders);
}

/// A task, which is stored as JSON.
#[derive(fang::serde::Serialize, fang::serde::Deserialize)]
#[serde(crate = "fang::serde")]
struct Message {
    payload: String,
}

#[fang::typetag::serde]
#[fang::async_trait]
impl AsyncRunnable for Message {
    async fn run(&self, _: &dyn AsyncQueueable) -> Result<(), FangError> {
        Ok(())
    }
}

struct Opened {
    queue: AsyncQueue,
    path: PathBuf,
    /// What was ever handed out.
    seen: Mutex<HashSet<String>>,
}

impl Opened {
    fn open(folder: &Path, wal: bool) -> Answer<Opened> {
        let path = folder.join("q.db");
        let prepare = || {
            let conn = Connection::open(&path)?;
            if wal {
                conn.query_row("PRAGMA journal_mode=WAL", [], |_| Ok(()))?;
            }
            conn.execute_batch(SCHEMA)
        };
        prepare().map_err(brief)?;
        let mut queue = AsyncQueue::builder().uri(format!("sqlite://{}", path.display())).max_pool_size(10_u32).build();
        runtime().block_on(queue.connect()).map_err(brief)?;
        Ok(Opened { queue, path, seen: Mutex::default() })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand { opened: self, queue: self.queue.clone(), held: None }))
    }
}

struct ByHand<'a> {
    opened: &'a Opened,
    queue: AsyncQueue,
    held: Option<Task>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        let message = Message { payload: String::from_utf8_lossy(payload).into_owned() };
        runtime().block_on(self.queue.insert_task(&message)).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.held = runtime().block_on(self.queue.fetch_and_touch_task(None)).map_err(brief)?;
        if let Some(task) = &self.held {
            read(task.metadata["payload"].as_str().unwrap_or_default().as_bytes());
        }
        Ok(self.held.is_some())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(task) = self.held.take() else { return Ok(()) };
        let first = self.opened.seen.lock().expect("no holder panics").insert(task.id.to_string());
        runtime().block_on(self.queue.remove_task(&task.id)).map_err(brief)?;
        if first { Ok(()) } else { Err("handed out twice".into()) }
    }

    /// No batches: copies of one row that it wrote.
    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.lay_out("new", 0, payload, count)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        match state {
            State::Delayed => self.lay_out("new", 7 * 24 * 3600, payload, count),
            State::Done => self.lay_out("finished", 0, payload, count),
            State::Dead => self.lay_out("failed", 0, payload, count),
            State::Gated => unable(),
        }
    }
}

impl ByHand<'_> {
    fn lay_out(&mut self, state: &str, delay: i64, payload: &[u8], count: usize) -> Answer<()> {
        const COPY: &str = "
            WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
            INSERT INTO fang_tasks (id, metadata, state, scheduled_at)
            SELECT randomblob(16), (SELECT metadata FROM fang_tasks ORDER BY rowid DESC LIMIT 1), ?2, unixepoch() + ?3 FROM n";
        self.enqueue(payload)?;
        let run = || {
            let conn = Connection::open(&self.opened.path)?;
            conn.busy_timeout(Duration::from_secs(30))?;
            conn.execute(COPY, params![count as i64, state, delay])
        };
        run().map(drop).map_err(brief)
    }
}
