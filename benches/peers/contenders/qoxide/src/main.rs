//! qoxide: one queue behind a mutex ("one queue per process", as its README says), and one for each thread.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, spy};
use qoxide::QoxideQueue;
use rusqlite::{Connection, params};

const ONLY_BETWEEN_THREADS: &str = "it differs only between threads";

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    // It sets WAL itself and leaves synchronous at SQLite's FULL.
    for (class, setting, forced) in [(FULL, "default", None), (NORMAL, "forced", Some("NORMAL"))] {
        for each in [false, true] {
            contenders.push(Contender {
                peer: if each { "qoxide, a queue a thread" } else { "qoxide" },
                class,
                setting,
                crew: false,
                open: Box::new(move |path| {
                    spy::force(forced);
                    Ok(Arc::new(Opened::open(path, each)?))
                }),
                settings: spy::settings,
                lacks: if each {
                    &[
                        ("W1", ONLY_BETWEEN_THREADS),
                        ("W2", ONLY_BETWEEN_THREADS),
                        ("W5", ONLY_BETWEEN_THREADS),
                        ("W6", ONLY_BETWEEN_THREADS),
                        ("W7", ONLY_BETWEEN_THREADS),
                        ("W8", ONLY_BETWEEN_THREADS),
                        ("W9", ONLY_BETWEEN_THREADS),
                    ]
                } else {
                    &[
                        ("W5", "no batches"),
                        ("W6 behind delayed", "no delays"),
                        ("W6 behind gated", "no gates"),
                        ("W7", "nothing wakes a consumer"),
                    ]
                },
            });
        }
    }
    driver::run(contenders);
}

type Shared = Arc<Mutex<QoxideQueue>>;

struct Opened {
    path: PathBuf,
    shared: Option<Shared>,
}

impl Opened {
    fn open(folder: &Path, each: bool) -> Answer<Opened> {
        let path = folder.join("q.db");
        let first = open(&path)?;
        Ok(Opened { path, shared: (!each).then_some(first) })
    }
}

fn open(path: &Path) -> Answer<Shared> {
    let queue = QoxideQueue::builder().path(path.to_str().ok_or("a path that is no text")?).build().map_err(brief)?;
    Ok(Arc::new(Mutex::new(queue)))
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        let queue = match &self.shared {
            Some(queue) => queue.clone(),
            None => open(&self.path)?,
        };
        Ok(Box::new(ByHand { queue, path: self.path.clone(), held: None }))
    }
}

struct ByHand {
    queue: Shared,
    path: PathBuf,
    held: Option<i64>,
}

impl Handle for ByHand {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.queue.lock().expect("no holder panics").add(payload.to_vec()).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let reserved = self.queue.lock().expect("no holder panics").reserve();
        match reserved {
            Ok((id, payload)) => {
                read(&payload);
                self.held = Some(id);
                Ok(true)
            }
            Err(rusqlite::Error::QueryReturnedNoRows) => Ok(false),
            Err(error) => Err(brief(error)),
        }
    }

    /// It keeps the row for ever.
    fn ack(&mut self) -> Answer<()> {
        let Some(id) = self.held.take() else { return Ok(()) };
        self.queue.lock().expect("no holder panics").complete(id).map_err(brief)
    }

    /// Its API has no batches: the rows that `add` writes, by SQL.
    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.lay_out("PENDING", payload, count)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        match state {
            State::Done => self.lay_out("COMPLETED", payload, count),
            State::Dead => self.lay_out("DEAD", payload, count),
            State::Delayed | State::Gated => driver::unable(),
        }
    }
}

impl ByHand {
    fn lay_out(&self, state: &str, payload: &[u8], count: usize) -> Answer<()> {
        const NUMBERS: &str = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)";
        let insert = || {
            let mut conn = Connection::open(&self.path)?;
            conn.busy_timeout(Duration::from_secs(30))?;
            let transaction = conn.transaction()?;
            let before: i64 =
                transaction.query_row("SELECT coalesce(max(id), 0) FROM payloads", [], |row| row.get(0))?;
            let payloads = format!("{NUMBERS} INSERT INTO payloads (data) SELECT ?2 FROM n");
            transaction.execute(&payloads, params![count as i64, payload])?;
            let messages = "INSERT INTO messages (state, payload_id) SELECT ?1, id FROM payloads WHERE id > ?2";
            transaction.execute(messages, params![state, before])?;
            transaction.commit()
        };
        insert().map_err(brief)
    }
}
