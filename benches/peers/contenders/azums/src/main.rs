//! azums: its SQLite backend, called as its own worker does: lease, begin an attempt, mark as succeeded.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use azums::{Job, NotificationStream, SqliteBackend, StorageBackend};
use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, runtime, spy, unable};
use serde_json::Value;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tokio_stream::StreamExt;

const QUEUE: &str = "default";
const LEASE_SECONDS: i64 = 60;

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for (class, setting) in [(FULL, "set"), (NORMAL, "default")] {
        contenders.push(Contender {
            peer: "azums",
            class,
            setting,
            crew: false,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class)?))),
            settings: spy::settings,
            lacks: &[
                ("W5", "its batches are loops of single commits"),
                ("W6 behind gated", "no gates"),
                ("W7 wake across", "its notifications stay in the process"),
            ],
        });
    }
    driver::run(contenders);
}

struct Opened {
    backend: SqliteBackend,
    next: AtomicU64,
}

impl Opened {
    /// As its own function for a pool does, with the durability set.
    fn open(folder: &Path, class: &str) -> Answer<Opened> {
        let synchronous = if class == FULL { SqliteSynchronous::Full } else { SqliteSynchronous::Normal };
        let options = SqliteConnectOptions::new()
            .filename(folder.join("q.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .busy_timeout(Duration::from_secs(5))
            .foreign_keys(true);
        let pool = SqlitePoolOptions::new().max_connections(5).acquire_timeout(Duration::from_secs(5));
        let backend = runtime().block_on(async {
            let backend = SqliteBackend::new(pool.connect_with(options).await.map_err(brief)?);
            backend.run_migrations().await.map_err(brief)?;
            Ok::<_, String>(backend)
        })?;
        Ok(Opened { backend, next: AtomicU64::new(0) })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        let worker = format!("w{}", self.next.fetch_add(1, Relaxed));
        Ok(Box::new(ByHand { backend: &self.backend, worker, wakes: None, held: None }))
    }
}

struct ByHand<'a> {
    backend: &'a SqliteBackend,
    worker: String,
    wakes: Option<NotificationStream>,
    held: Option<Job>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        let job = Job::new("j", Value::String(String::from_utf8_lossy(payload).into_owned()));
        runtime().block_on(self.backend.enqueue(job.into())).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let leased = self.backend.lease_jobs_batch(QUEUE, &self.worker, LEASE_SECONDS, 1);
        self.held = runtime().block_on(leased).map_err(brief)?.pop();
        if let Some(job) = &self.held {
            read(job.payload.as_str().unwrap_or_default().as_bytes());
        }
        Ok(self.held.is_some())
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        if self.wakes.is_none() {
            self.wakes = Some(runtime().block_on(self.backend.subscribe(QUEUE)).map_err(brief)?);
        }
        while !self.claim(read)? {
            let wakes = self.wakes.as_mut().expect("it was just set");
            runtime().block_on(wakes.next()).ok_or("the notifications have ended")?;
        }
        Ok(())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(job) = self.held.take() else { return Ok(()) };
        runtime().block_on(async {
            let sets = [job.dataset_id.clone()];
            let begun = self.backend.start_attempts_batch(&sets, &[job.id], &self.worker).await.map_err(brief)?;
            let attempt = begun.first().ok_or("no attempt")?.1;
            self.backend.mark_succeeded(job.id, attempt, &self.worker, 1).await.map_err(brief)
        })
    }

    /// Its batches are loops: copies of one row that it wrote.
    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.lay_out("queued", "-1 day", payload, count)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        match state {
            State::Delayed => self.lay_out("queued", "+7 days", payload, count),
            State::Done => self.lay_out("succeeded", "-1 day", payload, count),
            State::Dead => self.lay_out("dlq", "-1 day", payload, count),
            State::Gated => unable(),
        }
    }
}

impl ByHand<'_> {
    fn lay_out(&mut self, status: &str, when: &str, payload: &[u8], count: usize) -> Answer<()> {
        self.enqueue(payload)?;
        let copy = format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}),
                 model AS (SELECT payload_json, max_attempts FROM jobs ORDER BY rowid DESC LIMIT 1),
                 times (at) AS (SELECT strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '{when}', '+' || (i / 1000.0) || ' seconds') FROM n)
             INSERT INTO jobs (id, dataset_id, queue, job_type, payload_json, run_at, status, priority, max_attempts,
                 created_at, updated_at)
             SELECT randomblob(16), 'default', '{QUEUE}', 'j', payload_json, at, '{status}', 0, max_attempts, at, at
             FROM times, model"
        );
        runtime().block_on(sqlx::query(&copy).execute(self.backend.pool())).map(drop).map_err(brief)
    }
}
