//! What SQLite itself says of a contender's connections, also where the contender hides them.
//!
//! An automatic extension notes each connection that this process opens, and a trace forgets it when it closes. So PRAGMA
//! journal_mode and PRAGMA synchronous can be asked on the very connections that the contender uses. Where a peer offers
//! no setting for its durability, `force` sets it as each connection opens, and keeps it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Mutex, Once};

use crate::contender::Peer;

type Db = *mut c_void;
type Entry = unsafe extern "C" fn(Db, *mut *mut c_char, *const c_void) -> c_int;
type Trace = unsafe extern "C" fn(u32, *mut c_void, *mut c_void, *mut c_void) -> c_int;
type Row = unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;
type Authorizer =
    unsafe extern "C" fn(*mut c_void, c_int, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;

unsafe extern "C" {
    fn sqlite3_auto_extension(entry: Option<unsafe extern "C" fn()>) -> c_int;
    fn sqlite3_trace_v2(db: Db, mask: u32, trace: Option<Trace>, context: *mut c_void) -> c_int;
    fn sqlite3_exec(db: Db, sql: *const c_char, row: Option<Row>, out: *mut c_void, error: *mut *mut c_char) -> c_int;
    fn sqlite3_set_authorizer(db: Db, authorizer: Option<Authorizer>, context: *mut c_void) -> c_int;
    fn sqlite3_db_filename(db: Db, name: *const c_char) -> *const c_char;
    fn sqlite3_db_readonly(db: Db, name: *const c_char) -> c_int;
    fn sqlite3_libversion() -> *const c_char;
}

const TRACE_CLOSE: u32 = 8;
const PRAGMA: c_int = 19;
const OK: c_int = 0;
const IGNORE: c_int = 2;

/// The addresses of the open connections.
static CONNECTIONS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static FORCED: Mutex<Option<&'static str>> = Mutex::new(None);

/// Notes all connections from now on.
pub fn watch() {
    static ONCE: Once = Once::new();
    // SAFETY: SQLite calls an extension's entry point with the arguments of `Entry`.
    ONCE.call_once(|| unsafe {
        sqlite3_auto_extension(Some(std::mem::transmute::<Entry, unsafe extern "C" fn()>(opened)));
    });
}

/// Connections that open from now on have this PRAGMA synchronous, whatever the contender says; none: the contender's own.
pub fn force(synchronous: Option<&'static str>) {
    watch();
    *FORCED.lock().expect("no holder panics") = synchronous;
}

/// SQLite's version, and `wal/FULL x5, wal/NORMAL (reads only)` for the open connections on files in this folder.
pub fn settings(folder: &Path, _: &dyn Peer) -> (String, String) {
    // SAFETY: the version is a static string.
    let version = unsafe { CStr::from_ptr(sqlite3_libversion()) };
    (format!("SQLite {}", version.to_string_lossy()), durability(folder))
}

/// Of the open connections on files in this folder.
pub fn durability(folder: &Path) -> String {
    let folder = folder.canonicalize().expect("the folder is there");
    let mut seen = BTreeMap::<String, usize>::new();
    for address in CONNECTIONS.lock().expect("no holder panics").clone() {
        let db = address as Db;
        // SAFETY: the connection is open: it is forgotten when it closes, and nobody closes one meanwhile.
        let (file, reads_only) = unsafe {
            let name = sqlite3_db_filename(db, c"main".as_ptr());
            let file = if name.is_null() { c"" } else { CStr::from_ptr(name) };
            (file.to_string_lossy().into_owned(), sqlite3_db_readonly(db, c"main".as_ptr()) == 1)
        };
        if !Path::new(&file).starts_with(&folder) {
            continue;
        }
        // SAFETY: as above.
        unsafe { sqlite3_set_authorizer(db, None, null_mut()) };
        let synchronous = match ask(db, c"PRAGMA synchronous").as_str() {
            "0" => "OFF".to_owned(),
            "1" => "NORMAL".to_owned(),
            "2" => "FULL".to_owned(),
            "3" => "EXTRA".to_owned(),
            other => format!("?{other}"),
        };
        let note = if reads_only { " (reads only)" } else { "" };
        *seen.entry(format!("{}/{synchronous}{note}", ask(db, c"PRAGMA journal_mode"))).or_default() += 1;
    }
    let times = |(what, count): (String, usize)| if count > 1 { format!("{what} x{count}") } else { what };
    seen.into_iter().map(times).collect::<Vec<_>>().join(", ")
}

fn ask(db: Db, sql: &CStr) -> String {
    let mut answer = String::from("?");
    // SAFETY: `first` is given the address of a String that outlives the call.
    unsafe { sqlite3_exec(db, sql.as_ptr(), Some(first), (&raw mut answer).cast(), null_mut()) };
    answer
}

unsafe extern "C" fn first(out: *mut c_void, count: c_int, values: *mut *mut c_char, _: *mut *mut c_char) -> c_int {
    // SAFETY: `ask` passes a String; SQLite passes `count` values, each null or a C string.
    unsafe {
        if count > 0 && !(*values).is_null() {
            *out.cast::<String>() = CStr::from_ptr(*values).to_string_lossy().into_owned();
        }
    }
    OK
}

unsafe extern "C" fn opened(db: Db, _: *mut *mut c_char, _: *const c_void) -> c_int {
    CONNECTIONS.lock().expect("no holder panics").push(db as usize);
    // SAFETY: SQLite has just opened the connection.
    unsafe { sqlite3_trace_v2(db, TRACE_CLOSE, Some(closed), null_mut()) };
    if let Some(synchronous) = *FORCED.lock().expect("no holder panics") {
        let sql = CString::new(format!("PRAGMA synchronous={synchronous}")).expect("no zero byte");
        // SAFETY: as above.
        unsafe {
            sqlite3_exec(db, sql.as_ptr(), None, null_mut(), null_mut());
            sqlite3_set_authorizer(db, Some(refuse_synchronous), null_mut());
        }
    }
    OK
}

unsafe extern "C" fn closed(_: u32, _: *mut c_void, db: *mut c_void, _: *mut c_void) -> c_int {
    CONNECTIONS.lock().expect("no holder panics").retain(|open| *open != db as usize);
    OK
}

/// The contender's own PRAGMA synchronous does nothing, and is no error.
unsafe extern "C" fn refuse_synchronous(
    _: *mut c_void,
    action: c_int,
    name: *const c_char,
    value: *const c_char,
    _: *const c_char,
    _: *const c_char,
) -> c_int {
    if action != PRAGMA || name.is_null() || value.is_null() {
        return OK;
    }
    // SAFETY: for a pragma SQLite passes its name as a C string.
    let name = unsafe { CStr::from_ptr(name) };
    if name.to_bytes().eq_ignore_ascii_case(b"synchronous") { IGNORE } else { OK }
}
