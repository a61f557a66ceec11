//! Files: how the database is found, and what may lie beside it. relet opens, makes, changes and removes only what is certainly its own.
//!
//! A name beside the database may be anything: a symbolic link, a FIFO that blocks whoever opens it, somebody's only copy of something.
//! So what is not a plain file of the expected form is never opened, nothing is opened through a link, and a folder is held by its
//! descriptor while its files are handled. What is made takes the owner, the group and the mode of the database, as SQLite
//! does for its own: a command that an administrator runs once must not shut the service out.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::random;

/// The device and inode of a file: whether a path still leads to it.
pub(crate) type Identity = (u64, u64);

/// What SQLite keeps beside a database.
const OF_SQLITE: [&str; 3] = ["-wal", "-shm", "-journal"];

/// The absolute path of a database, so that it is the same file whatever the current folder becomes, and so that no name
/// (":memory:", "file:…") means anything but itself.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let refuse = |detail: String| Error::Open { path: path.to_owned(), detail };
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(refuse("the path contains a NUL byte".into()));
    }
    if let Ok(whole) = path.canonicalize() {
        if whole.is_dir() {
            return Err(refuse("it is a folder; name a file in it".into()));
        }
        return Ok(whole);
    }
    // A link that leads nowhere would be created at its end, where nobody looks for it.
    if path.symlink_metadata().is_ok_and(|file| file.is_symlink()) {
        return Err(refuse("it is a symbolic link that leads nowhere; remove it, or make what it leads to".into()));
    }
    let name = path.file_name().ok_or_else(|| refuse("it names no file".into()))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = folder.canonicalize().map_err(|error| refuse(format!("its folder cannot be opened: {error}")))?;
    Ok(folder.join(name))
}

/// A file that lies beside the database, under its name and a suffix.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes an empty file where there is none.
pub(crate) fn create(path: &Path, private: bool) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    if private {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    let _ = private;
    match options.open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            Err(Error::ReadOnly { path: path.to_owned(), detail: format!("the file cannot be created: {error}") })
        }
        Err(error) => Err(Error::Open { path: path.to_owned(), detail: error.to_string() }),
    }
}

/// Refuses what cannot be one store under one name, before anything opens it: what is no plain file, and a file that can be reached by
/// another name, where SQLite would keep a second log for it.
pub(crate) fn check(path: &Path) -> Result<()> {
    check_kind(path)?;
    if has_log_of_another(path) {
        let detail = "it is the log of another file, which had this name before: that file was replaced while a process had it open, \
                      or after one was killed. End the processes that have it open; then remove this log and the -shm beside it, \
                      if what was committed to the other file last is not wanted any more, or else put that file back. \
                      (`relet restore SRC` replaces a file and its log together.)";
        return Err(Error::Open { path: beside(path, "-wal"), detail: detail.into() });
    }
    Ok(())
}

/// As [`check`], and does not ask whose the log is.
pub(crate) fn check_kind(path: &Path) -> Result<()> {
    let refuse = |detail: String| Err(Error::Open { path: path.to_owned(), detail });
    let file = match std::fs::metadata(path) {
        Ok(file) => file,
        Err(error) => return refuse(error.to_string()),
    };
    if !file.is_file() {
        return refuse(format!("it is {}, not a file", kind(&file)));
    }
    if let Some(names) = names(&file).filter(|names| *names > 1) {
        return refuse(format!(
            "the file has {names} names (hard links), and each would have a log of its own, so that messages would be lost; \
             remove the others, or copy the file (`find -samefile` lists them)"
        ));
    }
    if is_mounted_alone(path) {
        return refuse(
            "the file itself is mounted here, without its folder, so that its log would be another one on the other side, and \
             messages would be lost; mount the folder that it lies in"
                .into(),
        );
    }
    for suffix in OF_SQLITE {
        let side = beside(path, suffix);
        match side.symlink_metadata() {
            Ok(file) if !file.is_file() => {
                let detail = format!("it is {} where SQLite keeps a file of its own; move it away", kind(&file));
                return Err(Error::Open { path: side, detail });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether the log that lies there is known to be of another file.
pub(crate) fn has_log_of_another(path: &Path) -> bool {
    let tie = note(&beside(path, "-wal"), TIE);
    tie.is_some() && tie != note(path, TIE)
}

/// What SQLite keeps beside this database, of what is there.
pub(crate) fn beside_it(path: &Path) -> Vec<PathBuf> {
    let sides = OF_SQLITE.into_iter().map(|suffix| beside(path, suffix));
    sides.filter(|side| side.symlink_metadata().is_ok()).collect()
}

/// What is wrong with a file; and where a log lies beside it, which may be the reason, that and the way out.
pub(crate) fn and_its_log(path: &Path, detail: String) -> String {
    let log = beside(path, "-wal");
    match std::fs::metadata(&log) {
        Ok(file) if file.len() > 0 => format!(
            "{detail}; {} lies beside it: if a backup was copied over the file, that log is of the file before and has damaged it; \
             put the backup there with `relet restore SRC`, which replaces both",
            log.display()
        ),
        _ => detail,
    }
}

/// Whether a file that SQLite cannot read has been one of its own once: it begins like one, or its beginning is lost.
pub(crate) fn was_a_database(path: &Path) -> bool {
    const BEGIN: &[u8; 16] = b"SQLite format 3\0";
    let mut begin = [0; BEGIN.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut begin));
    read.is_ok() && (begin == *BEGIN || begin == [0; BEGIN.len()])
}

/// Brings the names in a file's folder to the disk.
pub(crate) fn sync_folder(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

/// Says of a database's log whose it is, so that it is not taken for that of another file which gets the name: SQLite would write the
/// pages of one file into the other. For whoever has the file locked.
pub(crate) fn tie_log(path: &Path) {
    let tie = note(path, TIE).unwrap_or_else(|| {
        let tie = random::name();
        set_note(path, TIE, &tie);
        tie
    });
    set_note(&beside(path, "-wal"), TIE, &tie);
}

/// What a file is, if it is not a plain one.
fn kind(file: &std::fs::Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = file.file_type();
        if kind.is_fifo() {
            return "a FIFO";
        } else if kind.is_socket() {
            return "a socket";
        } else if kind.is_block_device() || kind.is_char_device() {
            return "a device";
        }
    }
    if file.is_dir() {
        "a folder"
    } else if file.is_symlink() {
        "a symbolic link"
    } else {
        "no plain file"
    }
}

#[cfg(unix)]
fn names(file: &std::fs::Metadata) -> Option<u64> {
    Some(std::os::unix::fs::MetadataExt::nlink(file))
}

#[cfg(not(unix))]
fn names(_: &std::fs::Metadata) -> Option<u64> {
    None
}

/// Whether the path is the root of a mount.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn is_mounted_alone(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE)
        .is_ok_and(|file| file.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn is_mounted_alone(_: &Path) -> bool {
    false
}

/// Asks the system before SQLite does, which would leave a log and an index beside a file that it cannot write.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn check_writable(path: &Path) -> Result<()> {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    for (place, what) in [(path, "the file"), (path.parent().unwrap_or(path), "its folder")] {
        if let Err(error) = accessat(CWD, place, Access::WRITE_OK, AtFlags::EACCESS) {
            let detail = format!("{what} cannot be written: {error}");
            return Err(Error::ReadOnly { path: path.to_owned(), detail });
        }
    }
    Ok(())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn check_writable(_: &Path) -> Result<()> {
    Ok(())
}

/// The device and inode that a path leads to. Opens nothing, so it drops none of SQLite's locks.
///
/// It asks for nothing else, since it is asked before each commit: Linux gives a file whose times somebody has looked at a new time with
/// its next write, and to bring that to the disk makes an `fsync` of the log half as long again.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
    match statx(CWD, path, AtFlags::empty(), StatxFlags::INO) {
        Ok(file) => Some((makedev(file.stx_dev_major, file.stx_dev_minor), file.stx_ino)),
        Err(rustix::io::Errno::NOSYS) => identity_by_stat(path),
        Err(_) => None,
    }
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    identity_by_stat(path)
}

#[cfg(unix)]
fn identity_by_stat(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Not known here: on this platform an open file cannot be replaced.
#[cfg(not(unix))]
pub(crate) fn identity(_: &Path) -> Option<Identity> {
    Some((0, 0))
}

/// A note on a file, in an extended attribute, that says which opening of the store was its last one. The contents say it, too; if the two
/// differ, the contents are others: somebody has copied a backup into the file.
pub(crate) const OPENING: &str = "user.relet.opening";
/// A note that is the same on a database and on its log.
const TIE: &str = "user.relet.tie";

/// What a note says; `None` where there is none, or the file system has none.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn note(path: &Path, name: &str) -> Option<String> {
    let mut value = [0; 64];
    let size = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
    String::from_utf8(value.get(..size)?.to_vec()).ok()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn set_note(path: &Path, name: &str, value: &str) {
    let set = rustix::fs::setxattr(path, name, value.as_bytes(), rustix::fs::XattrFlags::empty());
    if set.is_err() {
        // An old one would be taken for a sign.
        let _ = rustix::fs::removexattr(path, name);
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn note(_: &Path, _: &str) -> Option<String> {
    None
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn set_note(_: &Path, _: &str, _: &str) {}

/// The files that this process has open. A child that is forked has a copy of it, in which they stand for ever.
static OPEN: Mutex<BTreeMap<Identity, OpenFile>> = Mutex::new(BTreeMap::new());
/// How long somebody may have it locked who is no thread of a process that this one was forked from.
const OPEN_LOCKED: Duration = Duration::from_secs(5);

struct OpenFile {
    /// The path by which it was opened.
    path: PathBuf,
    count: usize,
    /// The process that has opened it.
    pid: u32,
}

/// Says that a file is open in this process, for as long as it lives.
#[derive(Debug)]
pub(crate) struct InUse(Identity);

impl InUse {
    /// Refuses a file that this process has open already and that was moved since: within a process SQLite keeps one index for a
    /// file, whatever its name, so that the log of the old name would be taken for that of the new one. And one that this
    /// process has inherited over a fork: SQLite's lists of what it has locked are inherited, too, and the locks are not.
    pub(crate) fn mark(path: &Path, identity: Identity) -> Result<InUse> {
        let pid = std::process::id();
        let Some(mut open) = OPEN.try_lock_for(OPEN_LOCKED) else {
            return Err(Error::Forked { parent: 0 }); // A thread that is not here any more has it locked.
        };
        let new = || OpenFile { path: path.to_owned(), count: 0, pid };
        let file = open.entry(identity).or_insert_with(new);
        if file.pid != pid {
            return Err(Error::Forked { parent: file.pid });
        }
        if file.path != path && self::identity(&file.path) != Some(identity) {
            let before = file.path.display();
            let detail = format!(
                "the file is open in this process as {before}, from where it was moved; drop every handle on that store first"
            );
            return Err(Error::Open { path: path.to_owned(), detail });
        }
        file.count += 1;
        Ok(InUse(identity))
    }
}

/// Whether this process has the file open.
pub(crate) fn is_open(identity: Identity) -> bool {
    OPEN.try_lock_for(OPEN_LOCKED).is_none_or(|open| open.contains_key(&identity))
}

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(mut open) = OPEN.try_lock_for(OPEN_LOCKED) else { return };
        if let Some(file) = open.get_mut(&self.0)
            && file.pid == std::process::id()
        {
            file.count -= 1;
            if file.count == 0 {
                open.remove(&self.0);
            }
        }
    }
}

/// Gives a file that was just made the owner, the group and the mode of the database; a folder may also be searched by whoever may read.
/// As far as the system lets us: only an administrator can give a file away, and then that is what is wanted.
#[cfg(unix)]
pub(crate) fn make_alike(made: &File, database: &Path) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let (Ok(model), Ok(file)) = (std::fs::metadata(database), made.metadata()) else { return };
    if (model.uid(), model.gid()) != (file.uid(), file.gid())
        && fchown(made, Some(model.uid()), Some(model.gid())).is_err()
    {
        let _ = fchown(made, None, Some(model.gid()));
    }
    let mode = model.mode() & 0o666;
    let mode = if file.is_dir() { mode | (mode & 0o444) >> 2 } else { mode };
    if file.mode() & 0o7777 != mode {
        let _ = made.set_permissions(std::fs::Permissions::from_mode(mode)); // explicitly: the umask takes bits away
    }
}

#[cfg(not(unix))]
pub(crate) fn make_alike(_: &File, _: &Path) {}

/// relet's own folder beside a database, in which the locks lie.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    path: PathBuf,
    database: PathBuf,
}

impl Folder {
    pub(crate) fn new(database: &Path) -> Folder {
        Folder { path: beside(database, "-relet-workers"), database: database.to_owned() }
    }

    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The error of a lock that cannot be made.
    fn refuse(&self, name: &str, detail: &str) -> Error {
        Error::Open {
            path: self.path_of(name),
            detail: format!(
                "a lock cannot be taken there: {detail}; {} must be a folder that can be written, and relet's alone: move \
                 away what else lies there, or allow writing",
                self.path.display()
            ),
        }
    }
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, mkdirat, openat, statat, unlinkat};
    use rustix::io::Errno;

    use super::*;

    const TRIES: u32 = 10;
    /// Nothing is opened through a link, and nothing that is opened can block or be inherited.
    const CAREFUL: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

    impl Folder {
        /// The folder itself, by its descriptor; `None`: there is none.
        fn hold(&self) -> Result<Option<File>, Errno> {
            match openat(CWD, &self.path, OFlags::RDONLY | OFlags::DIRECTORY | CAREFUL, Mode::empty()) {
                Ok(folder) => Ok(Some(folder.into())),
                Err(Errno::NOENT) => Ok(None),
                Err(error) => Err(error),
            }
        }

        fn hold_or_make(&self) -> Result<File, Errno> {
            if let Some(folder) = self.hold()? {
                return Ok(folder);
            }
            match mkdirat(CWD, &self.path, Mode::RWXU) {
                Ok(()) => {
                    let folder = self.hold()?.ok_or(Errno::NOENT)?;
                    make_alike(&folder, &self.database);
                    Ok(folder)
                }
                Err(Errno::EXIST) => self.hold()?.ok_or(Errno::NOENT),
                Err(error) => Err(error),
            }
        }

        /// Makes a file of this name, which must be new.
        pub(crate) fn create(&self, name: &str) -> Result<File> {
            self.make(name, OFlags::WRONLY | OFlags::EXCL)
        }

        /// Opens relet's file of this name, and makes it where there is none.
        pub(crate) fn open_or_create(&self, name: &str) -> Result<File> {
            match self.open(name)? {
                Some(file) => {
                    // The database's mode may have been changed since.
                    make_alike(&file, &self.database);
                    if let Ok(Some(folder)) = self.hold() {
                        make_alike(&folder, &self.database);
                    }
                    Ok(file)
                }
                None => self.make(name, OFlags::RDWR),
            }
        }

        fn make(&self, name: &str, how: OFlags) -> Result<File> {
            let once = || {
                let folder = self.hold_or_make()?;
                openat(&folder, name, how | OFlags::CREATE | CAREFUL, Mode::RUSR | Mode::WUSR)
            };
            // The last one who was there may remove the empty folder in between.
            let made = (0..TRIES).map(|_| once()).find(|made| !matches!(made, Err(Errno::NOENT))).unwrap_or_else(once);
            let file = File::from(made.map_err(|error| match error {
                Errno::NOSPC | Errno::DQUOT => crate::reserve::full(&self.database),
                error => self.refuse(name, &error.to_string()),
            })?);
            if !is_own(&file) {
                return Err(self.refuse(name, "a file of this name is not relet's"));
            }
            make_alike(&file, &self.database);
            Ok(file)
        }

        /// Opens relet's file of this name; `None`: there is none.
        ///
        /// # Errors
        /// Also where something else has this name.
        pub(crate) fn open(&self, name: &str) -> Result<Option<File>> {
            let refuse = |detail: &str| Err(self.refuse(name, detail));
            let opened = self.hold().and_then(|folder| match folder {
                Some(folder) => openat(&folder, name, OFlags::RDONLY | CAREFUL, Mode::empty()).map(File::from),
                None => Err(Errno::NOENT),
            });
            match opened {
                Ok(file) if is_own(&file) => Ok(Some(file)),
                Ok(_) => refuse("a file of this name is not relet's"),
                Err(Errno::NOENT) => Ok(None),
                Err(error) => refuse(&error.to_string()),
            }
        }

        /// Whether a file of this name is there, and may not be opened by this user.
        pub(crate) fn is_closed_to_us(&self, name: &str) -> bool {
            let opened = self.hold().and_then(|folder| match folder {
                Some(folder) => openat(&folder, name, OFlags::RDONLY | CAREFUL, Mode::empty()).map(drop),
                None => Ok(()),
            });
            matches!(opened, Err(Errno::ACCESS | Errno::PERM))
        }

        /// Removes relet's file of this name.
        pub(crate) fn remove(&self, name: &str) {
            if let Ok(Some(folder)) = self.hold() {
                let _ = unlinkat(&folder, name, AtFlags::empty());
            }
        }

        /// Whether the file of this name is this one.
        pub(crate) fn has(&self, name: &str, file: &File) -> bool {
            let Ok(Some(folder)) = self.hold() else { return false };
            let named = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW);
            file.metadata()
                .is_ok_and(|file| named.is_ok_and(|named| (named.st_dev, named.st_ino) == (file.dev(), file.ino())))
        }

        /// Removes the folder, if nothing lies there any more.
        pub(crate) fn remove_if_empty(&self) {
            let _ = unlinkat(CWD, &self.path, AtFlags::REMOVEDIR);
        }

        /// The names of what lies there.
        pub(crate) fn names(&self) -> Vec<String> {
            let Ok(Some(folder)) = self.hold() else { return Vec::new() };
            let Ok(entries) = Dir::read_from(&folder) else { return Vec::new() };
            entries.flatten().filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).collect()
        }
    }

    /// An empty plain file of one name.
    fn is_own(file: &File) -> bool {
        file.metadata().is_ok_and(|file| file.is_file() && file.len() == 0 && file.nlink() == 1)
    }
}

#[cfg(not(unix))]
impl Folder {
    /// Makes a file of this name, which must be new.
    pub(crate) fn create(&self, name: &str) -> Result<File> {
        let made = std::fs::create_dir_all(&self.path)
            .and_then(|()| OpenOptions::new().write(true).create_new(true).open(self.path.join(name)));
        made.map_err(|error| self.refuse(name, &error.to_string()))
    }

    /// Opens relet's file of this name, and makes it where there is none.
    pub(crate) fn open_or_create(&self, name: &str) -> Result<File> {
        let opened = std::fs::create_dir_all(&self.path).and_then(|()| {
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(self.path.join(name))
        });
        opened.map_err(|error| self.refuse(name, &error.to_string()))
    }

    /// Opens relet's file of this name; `None`: there is none.
    pub(crate) fn open(&self, name: &str) -> Result<Option<File>> {
        let path = self.path.join(name);
        match path.symlink_metadata() {
            Ok(file) if file.is_file() && file.len() == 0 => {}
            Ok(_) => return Err(self.refuse(name, "a file of this name is not relet's")),
            Err(_) => return Ok(None),
        }
        match File::open(path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.refuse(name, &error.to_string())),
        }
    }

    /// Whether a file of this name is there, and may not be opened by this user.
    pub(crate) fn is_closed_to_us(&self, name: &str) -> bool {
        File::open(self.path.join(name)).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
    }

    /// Removes relet's file of this name.
    pub(crate) fn remove(&self, name: &str) {
        let _ = std::fs::remove_file(self.path.join(name));
    }

    /// Whether the file of this name is this one: nothing is removed here that somebody has open.
    pub(crate) fn has(&self, _: &str, _: &File) -> bool {
        true
    }

    pub(crate) fn remove_if_empty(&self) {}

    /// The names of what lies there.
    pub(crate) fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(&self.path) else { return Vec::new() };
        entries.flatten().filter_map(|entry| entry.file_name().to_str().map(str::to_owned)).collect()
    }
}
