//! A disk that fails and loses power: an SQLite VFS over the real one.
//!
//! The real unix VFS opens the file; then the file's method table is swapped for a copy in which read, write, truncate, sync
//! and close are ours. Locks and shared memory stay the real ones, so WAL works with threads as usual. It is registered as
//! the default VFS of the process, and passes everything through until it is told otherwise.
//! (The technique is SQLite's own: see test_vfs.c and test6.c, "crash VFS", in its source.)

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once};

use relet::rusqlite::ffi::*;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Read,
    Write,
    /// Half of it is written, then the disk is full.
    Full,
    /// The sync fails, and what was to be synced never reaches the disk.
    Sync,
    Truncate,
}

#[derive(Default)]
struct Disk {
    /// The fault, which operation of its kind it hits first, and whether it goes on from there.
    plan: Option<(Fault, u32, bool)>,
    seen: u32,
    fired: u32,
    /// A folder, and how many bytes all files in it may have.
    room: Option<(PathBuf, u64)>,
    recording: bool,
    files: HashMap<PathBuf, File>,
    images: Vec<Image>,
    mark: usize,
    open: HashMap<usize, (usize, PathBuf)>,
    tables: HashMap<usize, usize>,
}

#[derive(Default, Clone)]
struct File {
    durable: Vec<u8>,
    pending: Vec<Pending>,
}

#[derive(Clone)]
enum Pending {
    Write(usize, Vec<u8>),
    Truncate(usize),
}

/// What a power cut at one moment would leave on the disk.
pub struct Image {
    /// The last mark that was set before that moment.
    pub mark: usize,
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

static DISK: Mutex<Option<Disk>> = Mutex::new(None);
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static REAL: Mutex<usize> = Mutex::new(0);

fn disk<T>(with: impl FnOnce(&mut Disk) -> T) -> T {
    let mut disk = DISK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    with(disk.get_or_insert_with(Disk::default))
}

/// The disk, to one test at a time; healthy again when this is dropped.
pub struct Bench(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Bench {
    pub fn take() -> Bench {
        static REGISTER: Once = Once::new();
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        REGISTER.call_once(register);
        disk(|disk| (disk.seen, disk.fired) = (0, 0));
        Bench(guard)
    }

    /// The `nth` operation of this kind fails, and if `sticky` all after it.
    pub fn break_at(&self, fault: Fault, nth: u32, sticky: bool) {
        disk(|disk| (disk.plan, disk.seen, disk.fired) = (Some((fault, nth, sticky)), 0, 0));
    }

    /// Nothing fails any more. Returns how often something did.
    pub fn mend(&self) -> u32 {
        disk(|disk| {
            (disk.plan, disk.room) = (None, None);
            std::mem::take(&mut disk.fired)
        })
    }

    /// What makes the files of this folder larger than that altogether finds the disk full.
    pub fn limit(&self, folder: &Path, bytes: u64) {
        disk(|disk| disk.room = Some((folder.to_owned(), bytes)));
    }

    /// From now on, an image is taken at each write and sync.
    pub fn record(&self, files: &[PathBuf]) {
        disk(|disk| {
            disk.files = files
                .iter()
                .map(|path| {
                    (path.clone(), File { durable: std::fs::read(path).unwrap_or_default(), pending: Vec::new() })
                })
                .collect();
            disk.images.clear();
            disk.recording = true;
        });
    }

    pub fn mark(&self, mark: usize) {
        disk(|disk| disk.mark = mark);
    }

    pub fn images(&self) -> Vec<Image> {
        disk(|disk| {
            disk.recording = false;
            std::mem::take(&mut disk.images)
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        disk(|disk| (disk.plan, disk.room, disk.recording) = (None, None, false));
    }
}

impl Disk {
    fn hit(&mut self, kinds: &[Fault]) -> Option<Fault> {
        let (fault, nth, sticky) = self.plan.filter(|(fault, _, _)| kinds.contains(fault))?;
        self.seen += 1;
        let hit = self.seen == nth || (sticky && self.seen > nth);
        self.fired += u32::from(hit);
        hit.then_some(fault)
    }

    /// Whether a file of this path may grow to `end` bytes.
    fn has_room(&self, path: &Path, end: u64) -> bool {
        let Some((folder, limit)) = &self.room else { return true };
        let len = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
        let used: u64 = std::fs::read_dir(folder).unwrap().flatten().map(|entry| len(&entry.path())).sum();
        end <= len(path) || used - len(path) + end <= *limit
    }

    fn note(&mut self, path: &PathBuf, what: Pending) {
        if self.recording && self.files.contains_key(path) {
            self.files.get_mut(path).unwrap().pending.push(what);
            self.take_images();
        }
    }

    /// Three cuts: nothing that was not synced has arrived; all of it has; the first half of it has.
    fn take_images(&mut self) {
        for share in [0, 1, 2] {
            let files = self.files.iter().map(|(path, file)| {
                let arrived = file.pending.len() * share / 2;
                (path.clone(), file.after(arrived))
            });
            self.images.push(Image { mark: self.mark, files: files.collect() });
        }
    }
}

impl File {
    fn after(&self, arrived: usize) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        for what in &self.pending[..arrived] {
            match what {
                Pending::Write(at, data) => {
                    bytes.resize(bytes.len().max(at + data.len()), 0);
                    bytes[*at..at + data.len()].copy_from_slice(data);
                }
                Pending::Truncate(len) => bytes.truncate(*len),
            }
        }
        bytes
    }
}

fn register() {
    // SAFETY: the VFS found is SQLite's own and lives for ever; the copy is leaked, so it does, too.
    unsafe {
        sqlite3_initialize();
        let real = sqlite3_vfs_find(std::ptr::null());
        *REAL.lock().unwrap() = real as usize;
        let mut copy = std::ptr::read(real);
        copy.zName = CString::new("failing").unwrap().into_raw();
        copy.pNext = std::ptr::null_mut();
        copy.xOpen = Some(open);
        assert_eq!(sqlite3_vfs_register(Box::into_raw(Box::new(copy)), 1), SQLITE_OK);
    }
}

unsafe extern "C" fn open(
    _: *mut sqlite3_vfs,
    name: sqlite3_filename,
    file: *mut sqlite3_file,
    flags: c_int,
    out: *mut c_int,
) -> c_int {
    // SAFETY: the arguments are SQLite's, passed on as they are; the method table is copied before it is changed.
    unsafe {
        let real = *REAL.lock().unwrap() as *mut sqlite3_vfs;
        let code = ((*real).xOpen.unwrap())(real, name, file, flags, out);
        if code != SQLITE_OK || (*file).pMethods.is_null() {
            return code;
        }
        let original = (*file).pMethods as usize;
        let path = match name.is_null() {
            true => PathBuf::new(),
            false => PathBuf::from(CStr::from_ptr(name).to_string_lossy().into_owned()),
        };
        (*file).pMethods = disk(|disk| {
            disk.open.insert(file as usize, (original, path));
            *disk.tables.entry(original).or_insert_with(|| {
                let mut methods = std::ptr::read(original as *const sqlite3_io_methods);
                methods.xClose = Some(close);
                methods.xRead = Some(read);
                methods.xWrite = Some(write);
                methods.xTruncate = Some(truncate);
                methods.xSync = Some(sync);
                Box::into_raw(Box::new(methods)) as usize
            })
        }) as *const sqlite3_io_methods;
        SQLITE_OK
    }
}

/// The real methods of a file that `open` has seen, and its path.
fn real(file: *mut sqlite3_file) -> (&'static sqlite3_io_methods, PathBuf) {
    let (methods, path) = disk(|disk| disk.open[&(file as usize)].clone());
    // SAFETY: method tables are static in SQLite.
    (unsafe { &*(methods as *const sqlite3_io_methods) }, path)
}

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    let (methods, _) = real(file);
    disk(|disk| disk.open.remove(&(file as usize)));
    // SAFETY: the file's own method.
    unsafe { methods.xClose.unwrap()(file) }
}

unsafe extern "C" fn read(file: *mut sqlite3_file, to: *mut c_void, len: c_int, at: i64) -> c_int {
    let (methods, _) = real(file);
    match disk(|disk| disk.hit(&[Fault::Read])) {
        Some(_) => SQLITE_IOERR_READ,
        // SAFETY: the file's own method, with SQLite's arguments.
        None => unsafe { methods.xRead.unwrap()(file, to, len, at) },
    }
}

unsafe extern "C" fn write(file: *mut sqlite3_file, from: *const c_void, len: c_int, at: i64) -> c_int {
    let (methods, path) = real(file);
    let (len, then) = match disk(|disk| disk.hit(&[Fault::Write, Fault::Full])) {
        Some(Fault::Full) => (len / 2, SQLITE_FULL),
        Some(_) => return SQLITE_IOERR_WRITE,
        None if !disk(|disk| disk.has_room(&path, at as u64 + len as u64)) => return SQLITE_FULL,
        None => (len, SQLITE_OK),
    };
    // SAFETY: the file's own method; `from` has at least `len` bytes.
    let (code, data) = unsafe {
        (methods.xWrite.unwrap()(file, from, len, at), std::slice::from_raw_parts(from.cast::<u8>(), len as usize))
    };
    disk(|disk| disk.note(&path, Pending::Write(at as usize, data.to_vec())));
    if then == SQLITE_OK { code } else { then }
}

unsafe extern "C" fn truncate(file: *mut sqlite3_file, len: i64) -> c_int {
    let (methods, path) = real(file);
    if disk(|disk| disk.hit(&[Fault::Truncate])).is_some() {
        return SQLITE_IOERR_TRUNCATE;
    }
    disk(|disk| disk.note(&path, Pending::Truncate(len as usize)));
    // SAFETY: the file's own method, with SQLite's arguments.
    unsafe { methods.xTruncate.unwrap()(file, len) }
}

/// The real disk is not asked to sync: the power is cut in the images only, and the tests are faster for it.
unsafe extern "C" fn sync(file: *mut sqlite3_file, _: c_int) -> c_int {
    let (_, path) = real(file);
    let failed = disk(|disk| {
        let failed = disk.hit(&[Fault::Sync]).is_some();
        if let Some(file) = disk.files.get_mut(&path).filter(|_| disk.recording) {
            let arrived = if failed { 0 } else { file.pending.len() };
            (file.durable, file.pending) = (file.after(arrived), Vec::new());
            disk.take_images();
        }
        failed
    });
    if failed { SQLITE_IOERR_FSYNC } else { SQLITE_OK }
}
