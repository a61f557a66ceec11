//! Room on the disk that is set aside, so that a store on a full disk can still be emptied.
//!
//! A claim, an ack, a deletion: each writes to the log before it frees anything, so on a full disk none of them would
//! work. The reserve is a written file beside the store, as large as the log gets between two checkpoints. When the disk
//! is full it is deleted; then the log can be moved into the file, and is written from its start again. It is made anew
//! as soon as there is room, and until then nothing is enqueued.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use crate::random;

/// Bytes written at once.
const BLOCK: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    bytes: u64,
    /// It was given up for the sake of what is stored, and could not be made again yet.
    spent: bool,
}

impl Reserve {
    pub(crate) fn new(path: PathBuf, bytes: u64) -> Reserve {
        Reserve { path, bytes, spent: false }
    }

    /// Whether the disk was found full, so that nothing more may be enqueued.
    pub(crate) fn is_spent(&self) -> bool {
        self.spent
    }

    /// Sees to it that the file is there, whole. Where there is no room for it, the disk counts as full.
    pub(crate) fn keep(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let whole = std::fs::metadata(&self.path).is_ok_and(|file| file.len() >= self.bytes);
        self.spent = !whole && self.make().is_err_and(|error| is_full(&error));
    }

    /// Deletes the file, if this or another process has not done so yet. Returns whether there may be more room now: once,
    /// until the file could be made again.
    pub(crate) fn release(&mut self) -> bool {
        if self.bytes == 0 || self.spent {
            return false;
        }
        self.spent = true;
        let _ = std::fs::remove_file(&self.path);
        true
    }

    /// Written under a name of its own first, so that another process never takes half a reserve for a whole one.
    fn make(&self) -> io::Result<()> {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{:016x}", random::bits()));
        let part = PathBuf::from(name);
        let made = self.fill(&part).and_then(|()| std::fs::rename(&part, &self.path));
        if made.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        made
    }

    fn fill(&self, part: &std::path::Path) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(part)?;
        // Random bytes: a file system that compresses would take nothing for zeros.
        let mut block = vec![0; BLOCK];
        fastrand::fill(&mut block);
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

/// Whether this error says that there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
