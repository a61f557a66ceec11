//! Backup: a whole new file, or none.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use crate::db;
use crate::error::{Error, Result};
use crate::files;
use crate::random;

/// Has `copy` fill a file beside the target, makes it a store of its own, and gives it the target's name at the end.
pub(crate) fn write(target: &Path, copy: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let refuse = |detail: String| Error::Backup { path: target.to_owned(), detail };
    let target = files::resolve(target).map_err(|error| match error {
        Error::Open { detail, .. } => refuse(detail),
        error => error,
    })?;
    if target.exists() {
        return Err(refuse("it exists already; choose a new name".into()));
    }
    let mut name = target.as_os_str().to_owned();
    name.push(format!(".{:016x}.part", random::bits()));
    let part = Part(name.into());
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(&part.0).map_err(|error| refuse(format!("it cannot be created: {error}")))?;
    copy(&part.0)?;
    db::make_backup_own(&part.0)?;
    // A link, unlike a rename, never replaces a file that has come to be there meanwhile.
    let linked = std::fs::hard_link(&part.0, &target).or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Err(error),
        _ if target.exists() => Err(std::io::ErrorKind::AlreadyExists.into()),
        _ => std::fs::rename(&part.0, &target), // a file system without links
    });
    linked.map_err(|error| refuse(format!("the finished copy cannot be given that name: {error}")))
}

/// The unfinished copy; removed in any case.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        for suffix in ["", "-journal"] {
            let mut name = self.0.as_os_str().to_owned();
            name.push(suffix);
            let _ = std::fs::remove_file(name);
        }
    }
}
