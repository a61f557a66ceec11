//! Claims with FOR UPDATE SKIP LOCKED, a lease and a token, as `raw` has them on SQLite; NOTIFY wakes who waits.

use std::time::Duration;

use driver::{Answer, Handle, Read, State, look, unable};
use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, Statement};

use crate::Opened;

const ENQUEUE: &str = "INSERT INTO messages (payload) VALUES ($1)";

const ENQUEUE_MANY: &str = "INSERT INTO messages (payload) SELECT $1 FROM generate_series(1, $2::bigint)";

const NOTIFY: &str = "NOTIFY ready";

const CLAIM: &str = "
    UPDATE messages
    SET status = 'processing', worker = 'bench', lease_until = now() + interval '60 seconds',
        token = token + 1, attempts = attempts + 1
    WHERE id IN (
        SELECT id FROM messages WHERE status = 'ready' AND due_at <= now()
        ORDER BY due_at, id LIMIT $1::bigint FOR UPDATE SKIP LOCKED)
    RETURNING id, token, payload";

const ACK: &str = "DELETE FROM messages WHERE id = $1 AND token = $2 AND status = 'processing'";

const ACK_MANY: &str = "
    DELETE FROM messages USING unnest($1::bigint[], $2::bigint[]) AS held (id, token)
    WHERE messages.id = held.id AND messages.token = held.token AND status = 'processing'";

const BEHIND: &str = "
    INSERT INTO messages (payload, status, due_at)
    SELECT $1, $2, now() + $3::bigint * interval '1 second' FROM generate_series(1, $4::bigint)";

const LONG: i64 = 7 * 24 * 3600;

pub struct ByHand {
    client: Client,
    enqueue: Statement,
    claim: Statement,
    ack: Statement,
    held: Option<(i64, i64)>,
    listens: bool,
}

impl ByHand {
    pub fn connect(opened: &Opened) -> Answer<ByHand> {
        let mut client = opened.connect()?;
        let mut prepare = |sql: &str| client.prepare(sql).map_err(text);
        let (enqueue, claim, ack) = (prepare(ENQUEUE)?, prepare(CLAIM)?, prepare(ACK)?);
        Ok(ByHand { client, enqueue, claim, ack, held: None, listens: false })
    }
}

impl Handle for ByHand {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.client.execute(&self.enqueue, &[&payload]).map_err(text)?;
        // Only a consumer that waits is to be woken: the others need no second statement.
        if driver::knobs().work == "W7" { self.client.batch_execute(NOTIFY).map_err(text) } else { Ok(()) }
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let row = self.client.query_opt(&self.claim, &[&1_i64]).map_err(text)?;
        self.held = row.as_ref().map(|row| (row.get(0), row.get(1)));
        if let Some(row) = &row {
            read(row.get(2));
        }
        Ok(row.is_some())
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        if !self.listens {
            self.client.batch_execute("LISTEN ready").map_err(text)?;
            self.listens = true;
        }
        while !self.claim(read)? {
            self.client.notifications().timeout_iter(Duration::from_secs(30)).next().map_err(text)?;
        }
        Ok(())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some((id, token)) = self.held.take() else { return Ok(()) };
        let acked = self.client.execute(&self.ack, &[&id, &token]).map_err(text)?;
        if acked == 1 { Ok(()) } else { Err("stale".into()) }
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.client.execute(ENQUEUE_MANY, &[&payload, &(count as i64)]).map(drop).map_err(text)
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let rows = self.client.query(&self.claim, &[&(max as i64)]).map_err(text)?;
        let (mut ids, mut tokens) = (Vec::<i64>::new(), Vec::<i64>::new());
        for row in &rows {
            look(row.get(2));
            ids.push(row.get(0));
            tokens.push(row.get(1));
        }
        self.client.execute(ACK_MANY, &[&ids, &tokens]).map_err(text)?;
        Ok(rows.len())
    }

    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.enqueue_batch(payload, count)?;
        // What autovacuum would have done by the time there are so many.
        if count >= 50_000 { self.client.batch_execute("VACUUM ANALYZE messages").map_err(text) } else { Ok(()) }
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let (status, later) = match state {
            State::Delayed => ("ready", LONG),
            State::Done => ("done", 0),
            State::Dead => ("dead", 0),
            State::Gated => return unable(),
        };
        self.client.execute(BEHIND, &[&payload, &status, &later, &(count as i64)]).map_err(text)?;
        self.client.batch_execute("VACUUM ANALYZE messages").map_err(text)
    }
}

fn text(error: postgres::Error) -> String {
    error.to_string()
}
