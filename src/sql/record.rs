//! The record: one message as the tables have it, put together from its row and from what lies beside that.

use rusqlite::{Connection, OptionalExtension, Row};

use crate::error::{Error, Result};
use crate::message::{DEFERRALS_MAX, MessageId};
use crate::receipt::Receipt;
use crate::sql::counters::Place;
use crate::sql::{Payload, details, finished, payloads};
use crate::state::{Event, Route, Status};

/// The line of what is held.
const HELD: i64 = -1;

/// The number of the line on this route that passes this gate, or none.
pub(crate) fn line_of(gate: Option<i64>, route: Route) -> i64 {
    4 * gate.unwrap_or(0) + route as i64
}

/// What lies beside a message's row, so that a plain message is not looked up anywhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Extras(i64);

impl Extras {
    /// It has a row of `relet_details`.
    pub(crate) const DETAILS: Extras = Extras(1);
    /// Its payload is in `relet_payloads`.
    pub(crate) const LARGE: Extras = Extras(2);

    pub(crate) fn new(bits: i64) -> Extras {
        Extras(bits)
    }

    pub(crate) fn bits(self) -> i64 {
        self.0
    }

    pub(crate) fn has(self, extras: Extras) -> bool {
        self.0 & extras.0 != 0
    }

    pub(crate) fn and(self, extras: Extras, when: bool) -> Extras {
        Extras(if when { self.0 | extras.0 } else { self.0 })
    }
}

/// What a claim does with a payload that lies beside its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Large {
    /// It is read; from [`payloads::BLOB_FROM`] on when the claim is committed, so that a process which dies of it has crashed.
    Read,
    Leave,
}

/// A message, without its payload.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) id: i64,
    pub(crate) queue: i64,
    pub(crate) status: Status,
    pub(crate) route: Route,
    /// The line it stands in, see [`line_of`]. `None`: it is held, waits, or is finished.
    pub(crate) line: Option<i64>,
    pub(crate) priority: i32,
    pub(crate) extras: Extras,
    pub(crate) due_at: Option<i64>,
    pub(crate) worker: Option<String>,
    pub(crate) incarnation: i64,
    /// The end of its lease. `None`: it is not held.
    pub(crate) lease_until: Option<i64>,
    pub(crate) claimed_at: i64,
    pub(crate) token: i64,
    pub(crate) epoch: i64,
    pub(crate) attempts: u32,
    pub(crate) crashes: u32,
    pub(crate) max_attempts: u32,
    pub(crate) enqueued_at: i64,
    pub(crate) payload_crc: u32,
    // Of `relet_details`, where it has a row there.
    pub(crate) key: Option<String>,
    pub(crate) group: Option<String>,
    pub(crate) gate: Option<i64>,
    pub(crate) tick_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) max_deferrals: u32,
    pub(crate) retry: Option<String>,
    pub(crate) deferrals: u32,
    pub(crate) releases: u32,
    pub(crate) redrives: u32,
    pub(crate) last_error: Option<String>,
    pub(crate) dead_reason: Option<String>,
    // Of `relet_finished`.
    pub(crate) finished_at: Option<i64>,
}

/// A SELECT of the columns that [`Record::read`] expects, in its order, with what follows `FROM`.
macro_rules! select_record {
    ($tail:literal) => {
        concat!(
            "SELECT m.id, m.queue, m.status, m.route, m.line, m.priority, m.extras, m.due_at, m.worker_id, m.incarnation,
                    m.place, m.claimed_at, m.token, m.epoch, m.attempts, m.crashes, m.max_attempts, m.enqueued_at,
                    m.payload_crc, m.payload
               FROM main.relet_messages m ",
            $tail
        )
    };
}
pub(crate) use select_record;

/// Where [`select_record!`] has the payload.
pub(crate) const PAYLOAD_COLUMN: usize = 19;

impl Record {
    /// What the message's own row says; [`Record::complete`] adds the rest.
    pub(crate) fn read(row: &Row<'_>) -> rusqlite::Result<Record> {
        let line: Option<i64> = row.get(4)?;
        Ok(Record {
            id: row.get(0)?,
            queue: row.get(1)?,
            status: row.get(2)?,
            route: row.get(3)?,
            line: line.filter(|line| *line != HELD),
            priority: row.get(5)?,
            extras: Extras::new(row.get(6)?),
            due_at: row.get(7)?,
            worker: row.get(8)?,
            incarnation: row.get::<_, Option<i64>>(9)?.unwrap_or(0),
            lease_until: if line == Some(HELD) { row.get(10)? } else { None },
            claimed_at: row.get::<_, Option<i64>>(11)?.unwrap_or(0),
            token: row.get(12)?,
            epoch: row.get(13)?,
            attempts: row.get(14)?,
            crashes: row.get(15)?,
            max_attempts: row.get(16)?,
            enqueued_at: row.get(17)?,
            payload_crc: row.get(18)?,
            key: None,
            group: None,
            gate: None,
            tick_at: None,
            expires_at: None,
            max_deferrals: DEFERRALS_MAX,
            retry: None,
            deferrals: 0,
            releases: 0,
            redrives: 0,
            last_error: None,
            dead_reason: None,
            finished_at: None,
        })
    }

    /// Adds what lies beside the row.
    pub(crate) fn complete(mut self, conn: &Connection) -> Result<Record> {
        if self.extras.has(Extras::DETAILS) {
            details::load(conn, &mut self)?;
        }
        if !self.status.is_live() {
            self.finished_at = finished::at(conn, self.id)?;
        }
        Ok(self)
    }

    /// What the message's own row says.
    pub(crate) fn load_row(conn: &Connection, id: i64) -> Result<Option<Record>> {
        const SQL: &str = select_record!("WHERE m.id = ?1");
        Ok(conn.prepare_cached(SQL)?.query_row([id], Record::read).optional()?)
    }

    /// The message with this id.
    pub(crate) fn load(conn: &Connection, id: i64) -> Result<Option<Record>> {
        Record::load_row(conn, id)?.map(|record| record.complete(conn)).transpose()
    }

    /// The message with this id, and its payload.
    pub(crate) fn load_whole(conn: &Connection, id: i64) -> Result<Option<(Record, Vec<u8>)>> {
        let Some((record, payload)) = Record::load_with_row_payload(conn, id)? else { return Ok(None) };
        let payload = payload.map_or_else(|| payloads::read(conn, id), Ok)?;
        Ok(Some((record.complete(conn)?, payload)))
    }

    /// The message with this id, and its payload as a claim wants it.
    pub(crate) fn load_for_claim(conn: &Connection, id: i64, large: Large) -> Result<Option<(Record, Payload)>> {
        Record::load_with_row_payload(conn, id)?.map(|found| Record::for_claim(conn, found, large)).transpose()
    }

    pub(crate) fn load_with_row_payload(conn: &Connection, id: i64) -> Result<Option<(Record, Option<Vec<u8>>)>> {
        const SQL: &str = select_record!("WHERE m.id = ?1");
        Ok(conn.prepare_cached(SQL)?.query_row([id], Record::read_whole).optional()?)
    }

    /// The first messages, up to `limit`, of those that are pending and pass no gate.
    pub(crate) fn load_ready(
        conn: &Connection,
        queue: i64,
        limit: usize,
        large: Large,
    ) -> Result<Vec<(Record, Payload)>> {
        const SQL: &str =
            select_record!("INDEXED BY relet_lines WHERE m.queue = ?1 AND m.line = 0 ORDER BY m.place, m.id LIMIT ?2");
        let mut statement = conn.prepare_cached(SQL)?;
        let found = statement.query_map([queue, limit as i64], Record::read_whole)?;
        found.map(|found| Record::for_claim(conn, found?, large)).collect()
    }

    fn read_whole(row: &Row<'_>) -> rusqlite::Result<(Record, Option<Vec<u8>>)> {
        Ok((Record::read(row)?, row.get(PAYLOAD_COLUMN)?))
    }

    /// Adds what lies beside the row.
    fn for_claim(
        conn: &Connection,
        (record, payload): (Record, Option<Vec<u8>>),
        large: Large,
    ) -> Result<(Record, Payload)> {
        let payload = match (payload, large) {
            (Some(payload), _) => Payload::Read(payload),
            (None, large) => match payloads::small(conn, record.id, large == Large::Read)? {
                // One that is not there is read as an empty one, which its checksum tells.
                None | Some(Payload::Left(0)) => Payload::Read(Vec::new()),
                Some(payload) => payload,
            },
        };
        Ok((record.complete(conn)?, payload))
    }

    pub(crate) fn id(&self) -> MessageId {
        MessageId::new(self.id)
    }

    pub(crate) fn receipt(&self) -> Receipt {
        Receipt::new(self.id(), self.token, self.epoch)
    }

    /// The status that `event` leads to; [`Error::Status`] where it cannot happen now.
    pub(crate) fn after(&self, event: Event, wanted: &'static str) -> Result<Status> {
        self.status.after(event, self.route).ok_or(Error::Status { id: self.id(), status: self.status, wanted })
    }

    /// Whether its time to live is over, and nobody had got it in time.
    pub(crate) fn is_expired(&self, now: i64) -> bool {
        self.worker.is_none() && self.status.is_live() && self.expires_at.is_some_and(|at| at <= now)
    }

    /// Whether somebody holds it with a lease, run out or not.
    pub(crate) fn is_held(&self) -> bool {
        self.lease_until.is_some()
    }

    /// The line in which it stands when it can be claimed.
    pub(crate) fn own_line(&self) -> i64 {
        line_of(self.gate, self.route)
    }

    /// Where the counters have it.
    pub(crate) fn place(&self) -> Place {
        Place::of(self.status, self.route, self.is_held())
    }
}

/// The size of a payload, without reading it.
pub(crate) fn payload_bytes(conn: &Connection, message: i64) -> Result<i64> {
    const SQL: &str =
        "SELECT coalesce(length(payload), (SELECT length(payload) FROM main.relet_payloads WHERE message = ?1), 0)
                         FROM main.relet_messages WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([message], |row| row.get(0)).optional()?.unwrap_or(0))
}
