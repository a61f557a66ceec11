//! Backup: a whole new file, or none.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
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
    let part = Part::make(&target).map_err(|error| refuse(format!("it cannot be created: {error}")))?;
    copy(part.path())?;
    db::make_backup_own(part.path())?;
    part.name(&target).map_err(|error| refuse(format!("the finished copy cannot be given that name: {error}")))
}

/// The unfinished copy; removed in any case.
pub(crate) struct Part(PathBuf);

impl Part {
    /// Makes an empty file beside the target, for its owner alone.
    pub(crate) fn make(target: &Path) -> io::Result<Part> {
        let part = Part(files::beside(target, &format!(".{:016x}.part", random::bits())));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(&part.0)?;
        Ok(part)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Gives it the target's name, and never replaces a file that has come to be there meanwhile.
    pub(crate) fn name(&self, target: &Path) -> io::Result<()> {
        match rename_alone(&self.0, target) {
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {}
            outcome => return outcome,
        }
        // A link does not replace, either; but a kill right after it leaves a file with two names.
        std::fs::hard_link(&self.0, target).or_else(|error| match error.kind() {
            ErrorKind::AlreadyExists => Err(error),
            _ if target.exists() => Err(ErrorKind::AlreadyExists.into()),
            _ => std::fs::rename(&self.0, target), // a file system without links
        })
    }
}

/// Renames a file, if nothing has the new name.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn rename_alone(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn rename_alone(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

impl Drop for Part {
    fn drop(&mut self) {
        for suffix in ["", "-journal"] {
            let mut name = self.0.as_os_str().to_owned();
            name.push(suffix);
            let _ = std::fs::remove_file(name);
        }
    }
}
