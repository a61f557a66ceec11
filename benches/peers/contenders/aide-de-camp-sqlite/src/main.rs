//! aide-de-camp with aide-de-camp-sqlite.

use std::convert::Infallible;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use aide_de_camp::core::job_handle::JobHandle;
use aide_de_camp::core::job_processor::JobProcessor;
use aide_de_camp::core::queue::Queue;
use aide_de_camp::core::{CancellationToken, Xid, new_xid};
use aide_de_camp_sqlite::{MIGRATOR, SqliteQueue};
use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, runtime, spy, unable};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for class in [FULL, NORMAL] {
        contenders.push(Contender {
            peer: "aide-de-camp-sqlite",
            class,
            setting: "set",
            crew: false,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class)?))),
            settings: spy::settings,
            lacks: &[
                ("W5", "no batches"),
                ("W6 behind gated", "no gates"),
                ("W6 behind done", "an ack deletes the row"),
                ("W7", "its runner polls"),
            ],
        });
    }
    driver::run(contenders);
}

/// What its queue needs to know of a kind of job.
struct Job;

#[async_trait::async_trait]
impl JobProcessor for Job {
    type Payload = Vec<u8>;
    type Error = Infallible;

    async fn handle(&self, _: Xid, _: Vec<u8>, _: CancellationToken) -> Result<(), Infallible> {
        Ok(())
    }

    fn name() -> &'static str {
        "j"
    }
}

struct Opened {
    pool: SqlitePool,
}

impl Opened {
    fn open(folder: &Path, class: &str) -> Answer<Opened> {
        let synchronous = if class == FULL { SqliteSynchronous::Full } else { SqliteSynchronous::Normal };
        let options = SqliteConnectOptions::from_str(&format!("sqlite://{}", folder.join("q.db").display()))
            .map_err(brief)?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous);
        runtime().block_on(async {
            let pool = SqlitePoolOptions::new().max_connections(10).connect_with(options).await.map_err(brief)?;
            MIGRATOR.run(&pool).await.map_err(brief)?;
            Ok(Opened { pool })
        })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand { queue: SqliteQueue::with_pool(self.pool.clone()), pool: &self.pool, held: None }))
    }
}

struct ByHand<'a> {
    queue: SqliteQueue,
    pool: &'a SqlitePool,
    held: Option<<SqliteQueue as Queue>::JobHandle>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        runtime().block_on(self.queue.schedule::<Job>(payload.to_vec(), 0)).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.held = runtime().block_on(self.queue.poll_next(&["j"])).map_err(brief)?;
        if let Some(job) = &self.held {
            read(&job.payload());
        }
        Ok(self.held.is_some())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(job) = self.held.take() else { return Ok(()) };
        runtime().block_on(job.complete()).map_err(brief)
    }

    /// No batches: the rows that it writes, by SQL.
    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.lay_out(0, payload, count)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        const BURY: &str = "
            INSERT INTO adc_dead_queue (jid, queue, job_type, payload, retries, scheduled_at, started_at, enqueued_at)
            SELECT jid, queue, job_type, payload, retries, scheduled_at, scheduled_at, enqueued_at FROM adc_queue";
        match state {
            State::Delayed => self.lay_out(i64::MAX / 2, payload, count),
            State::Dead => {
                self.lay_out(0, payload, count)?;
                runtime().block_on(async {
                    for change in [BURY, "DELETE FROM adc_queue"] {
                        sqlx::query(change).execute(self.pool).await.map_err(brief)?;
                    }
                    Ok(())
                })
            }
            State::Gated | State::Done => unable(),
        }
    }
}

impl ByHand<'_> {
    fn lay_out(&self, when: i64, payload: &[u8], count: usize) -> Answer<()> {
        const INSERT: &str =
            "INSERT INTO adc_queue (jid, job_type, payload, scheduled_at, priority) VALUES (?1, 'j', ?2, ?3, 0)";
        // It stores a list of bytes with its length before it.
        let stored = bincode::encode_to_vec(payload.to_vec(), bincode::config::standard()).map_err(brief)?;
        runtime().block_on(async {
            let mut transaction = self.pool.begin().await.map_err(brief)?;
            for index in 0..count as i64 {
                let insert = sqlx::query(INSERT).bind(new_xid().to_string()).bind(&stored);
                insert.bind(when + index / 1_000).execute(&mut transaction).await.map_err(brief)?;
            }
            transaction.commit().await.map_err(brief)
        })
    }
}
