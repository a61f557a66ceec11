//! The pages that commits write to the log, by table and index. The bench and tests/cost.rs share it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use relet::rusqlite::Connection;

/// The pages that tell which table a page belongs to, for incremental vacuum.
pub const POINTER_MAP: &str = "(pointer map)";
/// Pages that belonged to nothing before and afterwards.
pub const FREE: &str = "(free)";

const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;

/// A log that was empty when this was made.
pub struct Log {
    path: PathBuf,
    /// Which table or index each page belonged to.
    names: BTreeMap<u32, String>,
}

/// What was written to the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pages {
    /// Pages, each time that one was written, by the table or index they belong to.
    pub by_name: BTreeMap<String, u64>,
    /// With the frames' headers.
    pub bytes: u64,
}

impl Pages {
    pub fn total(&self) -> u64 {
        self.by_name.values().sum()
    }
}

impl Log {
    /// Empties the log of this file. Nobody may be in a transaction, and nobody may move the log into the file until the end.
    pub fn begin(path: &Path) -> Log {
        let conn = Connection::open(path).expect("the file opens");
        let busy: i64 =
            conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)).expect("the log can be emptied");
        assert_eq!(busy, 0, "nobody holds the log");
        Log { path: path.to_owned(), names: names(&conn) }
    }

    /// What has been committed since.
    pub fn end(self) -> Pages {
        let log = std::fs::read(beside(&self.path, "-wal")).expect("there is a log");
        let conn = Connection::open(&self.path).expect("the file opens");
        let after = names(&conn);
        let has_pointers: i64 = conn.query_row("PRAGMA auto_vacuum", [], |row| row.get(0)).expect("it can be asked");
        let number = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().expect("four bytes"));
        let page_size = number(8);
        let name = |page: u32| match after.get(&page).or_else(|| self.names.get(&page)) {
            Some(name) => name,
            // Each stands before the pages that it tells of: five bytes for each of them.
            None if has_pointers != 0 && (page - 2).is_multiple_of(page_size / 5 + 1) => POINTER_MAP,
            None => FREE,
        };
        let mut pages = Pages::default();
        let mut open = Vec::new();
        let frame = FRAME_HEADER + page_size as usize;
        for at in (HEADER..).step_by(frame).take_while(|at| at + frame <= log.len()) {
            // What an earlier turn of the log has left behind has other salts.
            if log[at + 8..at + 16] != log[16..24] {
                break;
            }
            open.push(number(at));
            let ends_a_commit = number(at + 4) != 0;
            if ends_a_commit {
                for page in open.drain(..) {
                    *pages.by_name.entry(name(page).to_owned()).or_default() += 1;
                    pages.bytes += frame as u64;
                }
            }
        }
        pages
    }
}

/// The table or index that each page belongs to.
fn names(conn: &Connection) -> BTreeMap<u32, String> {
    let mut statement = conn.prepare("SELECT pageno, name FROM dbstat").expect("SQLite has dbstat compiled in");
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("it can be asked");
    rows.collect::<Result<_, _>>().expect("it answers")
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
