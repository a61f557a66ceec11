//! effectum: messages are taken by its workers alone.
//!
//! It asks for synchronous=normal, and for WAL by a pragma that does not exist (`journal`): by itself it runs with a
//! rollback journal. The other settings put the file in WAL mode beforehand.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use driver::{Answer, Contender, Crew, FULL, Handle, Handler, NORMAL, Peer, State, brief, runtime, spy, unable};
use effectum::{Job, JobRunner, Queue, RunningJob, Worker};
use rusqlite::Connection;

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for (class, setting, wal, forced) in [
        (FULL, "default: DELETE", false, None),
        (FULL, "forced", true, Some("FULL")),
        (NORMAL, "WAL set beforehand", true, None),
    ] {
        contenders.push(Contender {
            peer: "effectum",
            class,
            setting,
            crew: true,
            open: Box::new(move |path| {
                spy::force(forced);
                Ok(Arc::new(Opened::open(path, wal)?))
            }),
            settings: spy::settings,
            lacks: &[
                ("W5 claim", "its workers settle one by one"),
                ("W6 behind gated", "no gates"),
                ("W7 wake across", "its workers see what their own process enqueues"),
            ],
        });
    }
    driver::run(contenders);
}

struct Opened {
    queue: Queue,
    path: PathBuf,
}

impl Opened {
    fn open(folder: &Path, wal: bool) -> Answer<Opened> {
        let path = folder.join("q.db");
        if wal {
            let switch = || {
                let conn = Connection::open(&path)?;
                conn.query_row("PRAGMA journal_mode=WAL", [], |_| Ok(()))?;
                // An empty file forgets its mode.
                conn.execute_batch("CREATE TABLE IF NOT EXISTS bench (id)")
            };
            switch().map_err(brief)?;
        }
        let queue = runtime().block_on(Queue::new(&path)).map_err(brief)?;
        Ok(Opened { queue, path })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Enqueuer(self)))
    }

    fn crew(&self, size: usize, handler: Handler) -> Answer<Box<dyn Crew + '_>> {
        let context = Arc::new(Context { handler, settled: AtomicU64::new(0) });
        let runner = JobRunner::builder("j", run).build();
        let worker = Worker::builder(&self.queue, context.clone()).jobs(vec![runner]).max_concurrency(size as u16);
        let worker = runtime().block_on(worker.build()).map_err(brief)?;
        Ok(Box::new(Running { _worker: worker, context }))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = runtime().block_on(self.queue.close(Duration::from_secs(2)));
    }
}

struct Context {
    handler: Handler,
    settled: AtomicU64,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Context")
    }
}

async fn run(job: RunningJob, context: Arc<Context>) -> Result<(), String> {
    (context.handler)(&job.payload);
    context.settled.fetch_add(1, Relaxed);
    Ok(())
}

struct Running {
    _worker: Worker,
    context: Arc<Context>,
}

impl Crew for Running {
    fn settled(&self) -> u64 {
        self.context.settled.load(Relaxed)
    }
}

struct Enqueuer<'a>(&'a Opened);

impl Handle for Enqueuer<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        runtime().block_on(self.0.queue.add_job(job(payload))).map(drop).map_err(brief)
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        let jobs = (0..count).map(|_| job(payload)).collect();
        runtime().block_on(self.0.queue.add_jobs(jobs)).map(drop).map_err(brief)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let change = match state {
            State::Delayed => {
                "UPDATE active_jobs SET run_at = run_at + 604800; UPDATE jobs SET orig_run_at = orig_run_at + 604800"
            }
            State::Done => "UPDATE jobs SET status = 'succeeded', finished_at = added_at; DELETE FROM active_jobs",
            State::Dead => "UPDATE jobs SET status = 'failed', finished_at = added_at; DELETE FROM active_jobs",
            State::Gated => return unable(),
        };
        self.fill(payload, count)?;
        let run = || {
            let conn = Connection::open(&self.0.path)?;
            conn.busy_timeout(Duration::from_secs(30))?;
            conn.execute_batch(change)
        };
        run().map_err(brief)
    }
}

fn job(payload: &[u8]) -> Job {
    Job::builder("j").payload(payload.to_vec()).build()
}
