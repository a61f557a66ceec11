//! Doctor: everything the tables promise, looked up the slow way.

use std::collections::BTreeMap;

use rusqlite::types::Value;
use rusqlite::{Connection, Params};

use crate::clock::{INSTANT_MAX, Now};
use crate::db::SCHEMA_VERSION;
use crate::error::Result;
use crate::sql::{checks, payloads};

/// Findings of one kind that are written out; the rest is counted.
const FINDINGS: usize = 20;

/// What is wrong with the store, in sentences.
pub(crate) fn examine(conn: &Connection, now: Now) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    push(&mut findings, "of the file", file(conn));
    push(&mut findings, "of the tables", schema(conn));
    push(&mut findings, "of relet_meta", meta(conn));
    for check in checks::all() {
        let of = check.split('\'').nth(1).unwrap_or_default();
        push(&mut findings, &format!("\"{}\"", of.trim()), sentences(conn, check, []));
    }
    push(&mut findings, "of the checksums", checksums(conn));
    push(&mut findings, "of the leases", sentences(conn, LEASES, [now.awake]));
    push(&mut findings, "of the clock", sentences(conn, FUTURE, [now.time + 86_400_000]));
    Ok(findings)
}

fn sentences(conn: &Connection, sql: &str, params: impl Params) -> Result<Vec<String>> {
    let mut statement = conn.prepare(sql)?;
    let rows = statement.query_map(params, |row| row.get::<_, String>(0))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Adds what a check has found. One that could not be run is a finding, too, and the others go on.
fn push(findings: &mut Vec<String>, of: &str, found: Result<Vec<String>>) {
    let mut found = found.unwrap_or_else(|error| vec![format!("the check {of} could not be run to its end: {error}")]);
    let more = found.len().saturating_sub(FINDINGS);
    found.truncate(FINDINGS);
    findings.extend(found);
    if more > 0 {
        findings.push(format!("… and {more} more of this kind"));
    }
}

fn file(conn: &Connection) -> Result<Vec<String>> {
    let mut statement = conn.prepare("PRAGMA main.integrity_check(20)")?;
    let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
    Ok(rows.collect::<rusqlite::Result<Vec<_>>>()?.into_iter().filter(|line| line != "ok").collect())
}

/// Every payload against its checksum.
fn checksums(conn: &Connection) -> Result<Vec<String>> {
    const SQL: &str = "SELECT id, payload_crc, payload FROM main.relet_messages ORDER BY id";
    let mut found = Vec::new();
    let mut statement = conn.prepare(SQL)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (id, expected): (i64, i64) = (row.get(0)?, row.get(1)?);
        let crc = match row.get_ref(2)?.as_blob_or_null().map_err(rusqlite::Error::from)? {
            Some(payload) => crc32fast::hash(payload),
            None => crc32fast::hash(&payloads::read(conn, id)?),
        };
        if i64::from(crc) != expected {
            found.push(format!("message {id}: its payload does not match its checksum"));
        }
    }
    Ok(found)
}

/// Instants that only a clock which was far ahead can have written: a day and more from now.
const FUTURE: &str =
    "SELECT 'message ' || id || ' was written by a clock that was ahead: its instants lie in the future; this passes when the clock gets there'
       FROM main.relet_messages m LEFT JOIN main.relet_finished f ON f.message = m.id
      WHERE max(m.enqueued_at, ifnull(m.claimed_at, 0), ifnull(f.finished_at, 0)) > ?1";

/// No lease ends later than its own length from now.
const LEASES: &str =
    "SELECT 'message ' || id || ': its lease ends later than its own length from now' FROM main.relet_messages
      WHERE line = -1 AND lease_ms IS NOT NULL AND place - lease_ms > ?1";

/// relet's tables, indexes and triggers against those that its schema makes.
fn schema(conn: &Connection) -> Result<Vec<String>> {
    let expected = objects(&expected_schema()?)?;
    let found = objects(conn)?;
    let mut wrong = Vec::new();
    for (name, (kind, sql)) in &expected {
        match found.get(name) {
            None => wrong.push(format!("the {kind} {name} is missing")),
            Some((_, other)) if other != sql => {
                wrong.push(format!("the {kind} {name} is not as relet's schema has it"))
            }
            Some(_) => {}
        }
    }
    for (name, (kind, _)) in found.iter().filter(|(name, _)| !expected.contains_key(*name)) {
        let drop = format!("DROP {} \"{name}\"", kind.to_uppercase());
        wrong
            .push(format!("the {kind} {name} is not relet's, and stands among its tables; if nobody needs it: {drop}"));
    }
    Ok(wrong)
}

/// A database with the tables as they should be.
pub(crate) fn expected_schema() -> Result<Connection> {
    let conn = Connection::open_in_memory()?;
    super::meta::create(&conn)?;
    Ok(conn)
}

/// What stands in the database under relet's names or upon its tables: each one's kind, and what made it, without comments and
/// spaces.
fn objects(conn: &Connection) -> Result<BTreeMap<String, (String, String)>> {
    const SQL: &str = "SELECT name, type, sql FROM main.sqlite_schema
                        WHERE sql IS NOT NULL AND (name GLOB 'relet_*' OR tbl_name GLOB 'relet_*')";
    let plain = |sql: String| {
        let code = sql.lines().map(|line| line.split("--").next().unwrap_or_default());
        code.flat_map(str::split_whitespace).collect::<String>()
    };
    let mut statement = conn.prepare(SQL)?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, (row.get(1)?, plain(row.get(2)?)))))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub(crate) type Fits = fn(&Value) -> bool;

/// The keys of relet_meta, whether every store has them, and what their values may be.
pub(crate) const META: [(&str, bool, Fits); 19] = [
    ("schema_version", true, |value| *value == Value::Integer(SCHEMA_VERSION)),
    ("store_id", true, |value| matches!(value, Value::Text(id) if !id.is_empty())),
    ("epoch", true, |value| matches!(value, Value::Integer(0..))),
    ("boot_id", true, |value| matches!(value, Value::Text(_) | Value::Null)),
    ("boot_mark", true, |value| matches!(value, Value::Integer(0..))),
    ("touched", true, |value| matches!(value, Value::Integer(0..))),
    ("incarnation", false, |value| matches!(value, Value::Integer(0..))),
    ("owned", false, |value| matches!(value, Value::Integer(0..=1))),
    ("file", false, |value| matches!(value, Value::Text(_))),
    ("opening", false, |value| matches!(value, Value::Text(_))),
    ("epoch_floor", false, |value| matches!(value, Value::Integer(0..))),
    ("clock_base", false, |value| matches!(value, Value::Integer(_))),
    ("clock_skew", false, |value| matches!(value, Value::Integer(_))),
    ("clock_ahead", false, |value| matches!(value, Value::Integer(_))),
    ("clock_sure", false, |value| matches!(value, Value::Integer(0..=1))),
    ("seen_at", false, |value| matches!(value, Value::Integer(0..=INSTANT_MAX))),
    ("seen_awake", false, |value| matches!(value, Value::Integer(0..=INSTANT_MAX))),
    ("reserve", false, |value| matches!(value, Value::Integer(0..))),
    ("file_max", false, |value| matches!(value, Value::Integer(0..))),
];

fn meta(conn: &Connection) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (key, needed, fits) in META {
        match super::meta::get::<Value>(conn, key)? {
            None if needed => wrong.push(format!("relet_meta has no {key:?}")),
            Some(value) if !fits(&value) => wrong.push(format!("relet_meta: {key:?} is {value:?}, which it cannot be")),
            _ => {}
        }
    }
    Ok(wrong)
}
