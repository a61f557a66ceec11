//! honker: one Database for all threads, and one for each.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, spy};
use honker::{ClaimWaker, Database, EnqueueOpts, Job, Queue, QueueOpts};

const ONLY_BETWEEN_THREADS: &str = "it differs only between threads";

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for (class, setting) in [(FULL, "set"), (NORMAL, "default")] {
        for each in [false, true] {
            contenders.push(Contender {
                peer: if each { "honker, a Database a thread" } else { "honker" },
                class,
                setting,
                crew: false,
                open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class, each)?))),
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
                    &[("W6 behind gated", "no gates"), ("W6 behind done", "an ack deletes the row")]
                },
            });
        }
    }
    driver::run(contenders);
}

struct Opened {
    path: PathBuf,
    synchronous: &'static str,
    shared: Option<Database>,
    next: AtomicU64,
}

impl Opened {
    fn open(folder: &Path, synchronous: &'static str, each: bool) -> Answer<Opened> {
        let path = folder.join("q.db");
        let first = open(&path, synchronous)?;
        Ok(Opened { path, synchronous, shared: (!each).then_some(first), next: AtomicU64::new(0) })
    }
}

fn open(path: &Path, synchronous: &str) -> Answer<Database> {
    let database = Database::open(path).map_err(brief)?;
    let set = format!("PRAGMA synchronous={synchronous}");
    database.with_conn(|conn| conn.execute_batch(&set)).map_err(brief)?;
    Ok(database)
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        let database = match &self.shared {
            Some(database) => database.clone(),
            None => open(&self.path, self.synchronous)?,
        };
        let queue = database.queue("q", QueueOpts::default());
        let worker = format!("w{}", self.next.fetch_add(1, Relaxed));
        Ok(Box::new(ByHand { database, queue, worker, waker: None, held: None }))
    }
}

struct ByHand {
    database: Database,
    queue: Queue,
    worker: String,
    waker: Option<ClaimWaker>,
    held: Option<Job>,
}

impl Handle for ByHand {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.queue.enqueue(&text(payload), EnqueueOpts::default()).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.held = self.queue.claim_one(&self.worker).map_err(brief)?;
        if let Some(job) = &self.held {
            read(job.payload_as::<String>().map_err(brief)?.as_bytes());
        }
        Ok(self.held.is_some())
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        let waker = self.waker.get_or_insert_with(|| self.queue.claim_waker());
        let job = waker.next(&self.worker).map_err(brief)?.ok_or("nothing came")?;
        read(&job.payload);
        self.held = Some(job);
        Ok(())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(job) = self.held.take() else { return Ok(()) };
        if job.ack().map_err(brief)? { Ok(()) } else { Err("the ack was refused".into()) }
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.batch(payload, count, EnqueueOpts::default)
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let jobs = self.queue.claim_batch(&self.worker, max as i64).map_err(brief)?;
        let ids: Vec<i64> = jobs.iter().map(|job| job.id).collect();
        if !ids.is_empty() {
            self.queue.ack_batch(&ids, &self.worker).map_err(brief)?;
        }
        Ok(ids.len())
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let change = match state {
            State::Delayed => "UPDATE _honker_live SET run_at = unixepoch() + 604800",
            State::Dead => {
                "INSERT INTO _honker_dead (id, queue, payload, last_error) SELECT id, queue, payload, 'bench' FROM _honker_live;
                 DELETE FROM _honker_live"
            }
            State::Gated | State::Done => return driver::unable(),
        };
        self.fill(payload, count)?;
        self.database.with_conn(|conn| conn.execute_batch(change)).map_err(brief)
    }
}

impl ByHand {
    fn batch(&self, payload: &[u8], count: usize, options: impl Fn() -> EnqueueOpts) -> Answer<()> {
        let transaction = self.database.transaction().map_err(brief)?;
        let text = text(payload);
        for _ in 0..count {
            self.queue.enqueue_tx(&transaction, &text, options()).map_err(brief)?;
        }
        transaction.commit().map_err(brief)
    }
}

/// It stores JSON.
fn text(payload: &[u8]) -> &str {
    std::str::from_utf8(payload).expect("payloads are text")
}
