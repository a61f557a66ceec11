//! Room on the disk that is set aside, so that a store on a full disk can still be emptied.
//!
//! A claim, an ack, a deletion: each writes to the log before it frees anything, so on a full disk none of them would
//! work. The reserve is a written file beside the store, as large as the log gets between two checkpoints. When the disk
//! is full it is deleted; then the log can be moved into the file, and is written from its start again. It is made anew
//! as soon as there is room, and until then nothing is enqueued.
//!
//! Its first line says whose it is. Whatever else lies under its name is not opened for writing, changed or removed.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rusqlite::ffi::SQLITE_IOERR_WRITE;

use crate::error::Error;
use crate::files::{beside, make_alike};
use crate::options::RESERVE;

/// Bytes written at once.
const BLOCK: usize = 64 << 10;
/// A smaller one would not hold what a few commits write.
const RESERVE_MIN: u64 = 128 << 10;
/// What a new, empty store takes, with its log.
const NEW_STORE: u64 = 1 << 20;
/// How its first line begins; the store's id and the whole size follow.
const MARK: &str = "relet reserve ";

#[derive(Debug)]
pub(crate) struct Reserve {
    /// The database; `None` in memory, where nothing is set aside.
    store: Option<PathBuf>,
    store_id: String,
    bytes: u64,
    /// It was given up for the sake of what is stored, and could not be made again yet.
    spent: bool,
}

/// What lies under its name.
#[derive(Debug, PartialEq, Eq)]
enum There {
    Nothing,
    /// A reserve of this size, or a part of one.
    Own(u64),
    /// Something that is not relet's.
    Foreign,
}

impl Reserve {
    pub(crate) fn new(store: Option<&Path>, store_id: &str) -> Reserve {
        Reserve { store: store.map(Path::to_owned), store_id: store_id.to_owned(), bytes: 0, spent: false }
    }

    /// Whether the disk was found full, so that nothing more may be enqueued.
    pub(crate) fn is_spent(&self) -> bool {
        self.spent
    }

    /// The error that says what there is no room for.
    pub(crate) fn full(&self) -> Error {
        let free = self.store.as_deref().and_then(free);
        Error::Full { needed: self.bytes.max(RESERVE_MIN), reserve: self.bytes, free, limit: None }
    }

    /// Sees to it that a file of this size is there, whole. Where there is no room for it, the disk counts as full.
    pub(crate) fn keep(&mut self, bytes: u64) {
        let Some(store) = &self.store else { return };
        self.bytes = bytes;
        self.spent = match there(&name(store)) {
            There::Own(size) if size == bytes => false,
            There::Own(_) if bytes == 0 => {
                give_up(store);
                false
            }
            There::Own(_) | There::Nothing if bytes > 0 => self.make(store).is_err_and(|error| is_full(&error)),
            // Under a name that is taken nothing can be set aside.
            _ => false,
        };
    }

    /// How much is set aside.
    pub(crate) fn bytes(&self) -> u64 {
        if self.spent { 0 } else { self.bytes }
    }

    /// Deletes the file, if this or another process has not done so yet. Returns whether there may be more room now: once,
    /// until the file could be made again.
    pub(crate) fn release(&mut self) -> bool {
        let Some(store) = self.store.as_deref().filter(|_| self.bytes > 0 && !self.spent) else { return false };
        self.spent = true;
        give_up(store);
        true
    }

    /// Written under another name first, so that nobody ever takes half a reserve for a whole one. That name is always the
    /// same one, and whoever writes there holds its lock: two processes do not both set room aside, and what a kill has
    /// left behind is written anew.
    fn make(&self, store: &Path) -> io::Result<()> {
        let (part, whole) = (part(store), name(store));
        let mut file = open(OpenOptions::new().read(true).write(true).create(true), &part)?;
        if !matches!(kind(&mut file)?, There::Own(_) | There::Nothing) {
            return Ok(());
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(()), // another process is at it
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Whoever had the lock before may just have finished it, before this one was opened or after.
        if !is_at(&part, &file)? {
            return Ok(());
        }
        if there(&whole) == There::Own(self.bytes) {
            let _ = std::fs::remove_file(&part);
            return Ok(());
        }
        let made = self.fill(&mut file, store).and_then(|()| match there(&whole) {
            There::Foreign => Err(io::ErrorKind::AlreadyExists.into()),
            _ => std::fs::rename(&part, &whole),
        });
        if made.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        made
    }

    fn fill(&self, file: &mut File, store: &Path) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        make_alike(file, store);
        // Random bytes: a file system that compresses would take nothing for zeros.
        let mut block = vec![0; BLOCK];
        fastrand::fill(&mut block);
        let first = format!("{MARK}{} {}\n", self.store_id, self.bytes);
        block[..first.len()].copy_from_slice(first.as_bytes());
        let mut left = self.bytes;
        while left > 0 {
            let now = left.min(BLOCK as u64) as usize;
            file.write_all(&block[..now])?;
            left -= now as u64;
        }
        // Some file systems find out only now that there is no room.
        file.sync_data()
    }
}

fn name(store: &Path) -> PathBuf {
    beside(store, "-relet-reserve")
}

fn part(store: &Path) -> PathBuf {
    beside(store, "-relet-reserve.part")
}

/// Deletes the reserve of this store, and what a kill has left of one that was being made.
pub(crate) fn give_up(store: &Path) {
    if matches!(there(&name(store)), There::Own(_)) {
        let _ = std::fs::remove_file(name(store));
    }
    let part = part(store);
    let dead = open(OpenOptions::new().read(true), &part).is_ok_and(|mut file| {
        matches!(kind(&mut file), Ok(There::Own(_))) && file.try_lock().is_ok() && is_at(&part, &file).unwrap_or(false)
    });
    if dead {
        let _ = std::fs::remove_file(part);
    }
}

fn there(path: &Path) -> There {
    match open(OpenOptions::new().read(true), path) {
        Ok(mut file) => match kind(&mut file) {
            // A whole one is never empty.
            Ok(There::Nothing) | Err(_) => There::Foreign,
            Ok(found) => found,
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => There::Nothing,
        Err(_) => There::Foreign,
    }
}

/// Opens a file without following a link, and without waiting for whoever is at the other end of a pipe.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32);
    }
    options.open(path)
}

/// Judges an open file by what it is and by its first line.
fn kind(file: &mut File) -> io::Result<There> {
    let about = file.metadata()?;
    if !about.is_file() || links(&about) != 1 {
        return Ok(There::Foreign);
    }
    let mut first = Vec::new();
    file.rewind()?;
    file.take(128).read_to_end(&mut first)?;
    let line = first.split(|byte| *byte == b'\n').next().and_then(|line| std::str::from_utf8(line).ok());
    let bytes = line.filter(|line| line.len() < first.len()).and_then(|line| {
        let (id, bytes) = line.strip_prefix(MARK)?.split_once(' ')?;
        id.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| bytes.parse::<u64>().ok())?
    });
    Ok(match bytes {
        Some(bytes) if about.len() <= bytes => There::Own(about.len()),
        _ if about.len() == 0 => There::Nothing,
        _ => There::Foreign,
    })
}

#[cfg(unix)]
fn links(about: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(about)
}

#[cfg(not(unix))]
fn links(_: &Metadata) -> u64 {
    1
}

/// Whether this name still leads to this open file.
#[cfg(unix)]
fn is_at(path: &Path, file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (here, open) = (std::fs::symlink_metadata(path), file.metadata()?);
    Ok(here.is_ok_and(|here| (here.dev(), here.ino()) == (open.dev(), open.ino())))
}

#[cfg(not(unix))]
fn is_at(path: &Path, _: &File) -> io::Result<bool> {
    Ok(path.exists())
}

/// The bytes that are free on the disk of this store for whoever is not root.
#[cfg(unix)]
pub(crate) fn free(store: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(store.parent()?).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
pub(crate) fn free(_: &Path) -> Option<u64> {
    None
}

/// How much is set aside for a store unless it is told otherwise: [`RESERVE`], but at most a quarter of what is free; nothing
/// where that is next to nothing.
pub(crate) fn fitting(store: &Path) -> u64 {
    match free(store).map_or(RESERVE, |free| RESERVE.min(free / 4)) {
        some if some < RESERVE_MIN => 0,
        some => some,
    }
}

/// The error of an opening that found no room.
pub(crate) fn full(store: &Path) -> Error {
    Error::Full { needed: NEW_STORE, reserve: 0, free: free(store), limit: None }
}

/// Whether this error says that there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Whether an operation on this store has failed for want of room. Of a spent quota and of a limit on the size of files SQLite
/// says only that a write has failed: then it is tried whether a file as long as the log could be written there.
pub(crate) fn ran_out(error: &Error, store: &Path) -> bool {
    match error {
        Error::Full { .. } => true,
        Error::Sqlite(inner) | Error::Indeterminate { source: inner } => {
            let code = inner.sqlite_error().map(|error| error.extended_code);
            code == Some(SQLITE_IOERR_WRITE) && would_not_fit(store).is_err_and(|error| is_full(&error))
        }
        _ => false,
    }
}

fn would_not_fit(store: &Path) -> io::Result<()> {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let longest = size(store).max(size(&beside(store, "-wal")));
    let mut file = tempfile::tempfile_in(store.parent().unwrap_or(store))?;
    file.seek(SeekFrom::Start(longest))?;
    file.write_all(&[1; BLOCK])?;
    file.sync_data()
}
