//! Enqueues of several threads in one commit: whoever comes first commits for all that have come meanwhile.

use std::path::Path;
use std::sync::{Condvar, Mutex};

use driver::{Answer, Handle, Peer};
use rusqlite::Connection;

use crate::bare::{ENQUEUE, SCHEMA};
use crate::connect::{connect, transaction};

pub struct Group {
    line: Mutex<Line>,
    turn: Condvar,
    conn: Mutex<Connection>,
}

/// Who waits for which commit. Commits are numbered.
#[derive(Default)]
struct Line {
    waiting: Vec<Vec<u8>>,
    next: u64,
    done: u64,
    led: bool,
}

impl Group {
    pub fn open(folder: &Path, synchronous: &str) -> Answer<Group> {
        let conn = Mutex::new(connect(folder, synchronous, SCHEMA)?);
        Ok(Group { line: Mutex::default(), turn: Condvar::new(), conn })
    }
}

impl Peer for Group {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Member(self)))
    }
}

struct Member<'a>(&'a Group);

impl Handle for Member<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        let group = self.0;
        let mut line = group.line.lock().expect("no holder panics");
        line.waiting.push(payload.to_vec());
        let mine = line.next;
        while line.done <= mine {
            if line.led {
                line = group.turn.wait(line).expect("no holder panics");
                continue;
            }
            line.led = true;
            let batch = std::mem::take(&mut line.waiting);
            line.next += 1;
            let done = line.next;
            drop(line);
            let committed = transaction(&group.conn.lock().expect("no holder panics"), |conn| {
                let mut insert = conn.prepare_cached(ENQUEUE)?;
                batch.iter().try_for_each(|payload| insert.execute([payload]).map(drop))
            });
            line = group.line.lock().expect("no holder panics");
            line.done = done;
            line.led = false;
            group.turn.notify_all();
            committed?;
        }
        Ok(())
    }
}
