//! Names, owners and what lies beside: one file is one store under one name, and relet opens, makes, changes and removes only what
//! is certainly its own.
#![cfg(all(unix, feature = "cli", feature = "testing"))]

mod support;

use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use relet::rusqlite::{Connection, TransactionBehavior};
use relet::{Error, Filter, Store};
use support::{Dir, beside, names, number, plain, timed};

fn open(path: &Path) -> Result<Store, Error> {
    Store::options().reserve(0).busy_wait(Duration::from_secs(20)).open(path)
}

fn refused(path: &Path, because: &str) {
    for outcome in [open(path), Store::open_read_only(path)] {
        match outcome {
            Err(Error::Open { detail, .. }) => assert!(detail.contains(because), "{detail}"),
            other => panic!("{other:?}"),
        }
    }
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// The folder of locks; it is made where there is none.
fn workers_folder(path: &Path) -> std::path::PathBuf {
    let folder = beside(path, "-relet-workers");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A store with a message in it, closed.
fn made(dir: &Dir) -> std::path::PathBuf {
    let path = dir.join("store.db");
    open(&path).unwrap().queue("mail").enqueue("hello").unwrap();
    path
}

#[test]
fn a_file_with_two_names_is_refused_under_both() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let other = dir.join("other.db");
    std::fs::hard_link(&path, &other).unwrap();
    for name in [&path, &other] {
        refused(name, "2 names");
    }
    std::fs::remove_file(&other).unwrap();
    assert_eq!(open(&path).unwrap().list(&Filter::new()).unwrap().len(), 1, "and then it is whole");
}

#[test]
fn what_is_no_plain_file_is_refused_at_once() {
    let dir = Dir::new("names");
    let pipe = dir.join("pipe");
    fifo(&pipe);
    let nowhere = dir.join("nowhere.db");
    symlink(dir.join("not there"), &nowhere).unwrap();
    let (_, took) = timed(|| {
        refused(&pipe, "a FIFO");
        refused(Path::new("/dev/null"), "a device");
        refused(dir.path(), "a folder");
        refused(&nowhere, "leads nowhere");
    });
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(!dir.join("not there").exists());
    // A link to a store is that store.
    let path = made(&dir);
    let link = dir.join("link.db");
    symlink(&path, &link).unwrap();
    let (by_link, by_name) = (open(&link).unwrap(), open(&path).unwrap());
    by_link.queue("mail").enqueue("by the link").unwrap();
    assert_eq!(by_name.list(&Filter::new()).unwrap().len(), 2);
}

#[test]
fn what_stands_where_sqlite_keeps_its_files_is_named_and_left_alone() {
    for suffix in ["-wal", "-shm", "-journal"] {
        let dir = Dir::new("names");
        let path = made(&dir);
        let side = beside(&path, suffix);
        fifo(&side);
        refused(&path, "a FIFO where SQLite keeps a file");
        std::fs::remove_file(&side).unwrap();
        let precious = dir.join("precious");
        std::fs::write(&precious, "precious").unwrap();
        symlink(&precious, &side).unwrap();
        refused(&path, "a symbolic link where SQLite keeps a file");
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
    }
}

#[test]
fn foreign_files_in_the_folder_of_locks_survive_every_start() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let folder = workers_folder(&path);
    let long = "0".repeat(32);
    std::fs::write(folder.join("README"), "").unwrap();
    std::fs::write(folder.join("0123456789abcdef.lock"), "").unwrap();
    std::fs::write(folder.join(format!("{long}.lock")), "somebody wrote here").unwrap();
    std::fs::write(folder.join(format!("{}.lock", "1".repeat(32))), "").unwrap(); // this one may be a dead worker's
    fifo(&folder.join(format!("{}.lock", "2".repeat(32))));
    symlink(dir.join("store.db"), folder.join(format!("{}.lock", "3".repeat(32)))).unwrap();
    std::fs::create_dir(folder.join(format!("{}.lock", "4".repeat(32)))).unwrap();
    std::fs::hard_link(folder.join("README"), folder.join(format!("{}.lock", "5".repeat(32)))).unwrap();
    let before = names(&folder);
    let store = open(&path).unwrap();
    let (worker, took) = timed(|| store.worker("w").unwrap());
    assert!(took < Duration::from_secs(5), "{took:?}");
    drop(worker);
    let mut left = before;
    left.retain(|name| name != &*format!("{}.lock", "1".repeat(32)));
    let mut found = names(&folder);
    found.retain(|name| !name.to_str().unwrap().starts_with("open-")); // the store's own
    assert_eq!(found, left);
}

#[test]
fn a_folder_of_locks_that_is_a_link_is_refused_and_nothing_behind_it_is_touched() {
    let dir = Dir::new("names");
    let precious = dir.folder("precious");
    let name = format!("{}.lock", "0".repeat(32));
    std::fs::write(precious.join(&name), "").unwrap();
    for target in [precious.as_path(), Path::new(".")] {
        let path = dir.join(format!("{}.db", target.file_name().map_or("dot".into(), |name| name.to_string_lossy())));
        symlink(target, beside(&path, "-relet-workers")).unwrap();
        assert!(matches!(open(&path), Err(Error::Open { .. })));
    }
    assert_eq!(names(&precious), [&*name]);
}

#[test]
fn a_name_in_the_table_that_relet_does_not_give_is_never_opened() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let pipe = dir.join("pipe");
    fifo(&pipe);
    let inside = format!("{}.lock", "a".repeat(32));
    fifo(&workers_folder(&path).join(&inside));
    let relative = format!("../pipe/../{inside}");
    for (at, lock) in [pipe.to_str().unwrap(), &*inside, &*relative, "..", "", "open.lock"].into_iter().enumerate() {
        let sql = "INSERT OR REPLACE INTO relet_workers (label, incarnation, pid, started_at, lock) VALUES (?1, 900 + ?2, 1, 1, ?3)";
        plain(&path).execute(sql, relet::rusqlite::params![format!("ghost {at}"), at as i64, lock]).unwrap();
    }
    let (_, took) = timed(|| {
        let store = open(&path).unwrap();
        store.workers().unwrap();
        let worker = store.worker("w").unwrap();
        worker.claim("mail").unwrap().unwrap().ack().unwrap();
        assert!(worker.claim("mail").unwrap().is_none());
        open(&path).unwrap().worker("ghost 0").unwrap();
    });
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_copied_file_is_another_store() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let copy = dir.join("copy.db");
    std::fs::copy(&path, &copy).unwrap();
    let store = open(&path).unwrap();
    // B9: a transaction on the copy is not one on the store, although the copy says that it is this store.
    let mut conn = plain(&copy);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    assert!(matches!(store.queue("mail").enqueue_in(&tx, "astray"), Err(Error::WrongFile { .. })));
    drop(tx);
    let mut conn = plain(&path);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    store.queue("mail").enqueue_in(&tx, "at home").unwrap();
    tx.commit().unwrap();
    // Once it is opened it has an id and an epoch of its own: no receipt of one is worth anything in the other.
    let id = |path: &Path| support::text(&plain(path), "SELECT value FROM relet_meta WHERE key = 'store_id'");
    let copied = open(&copy).unwrap();
    assert_ne!(id(&path), id(&copy));
    let receipt = store.worker("a").unwrap().claim("mail").unwrap().unwrap().receipt();
    let theirs = copied.worker("b").unwrap().claim("mail").unwrap().unwrap();
    assert_eq!(receipt.id(), theirs.id());
    assert!(copied.ack(receipt).is_err());
    theirs.ack().unwrap();
}

/// The commonest way to restore: a copy is written into the file, whose inode stays the same.
#[test]
fn a_file_that_was_restored_in_place_issues_no_receipt_again() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let backup = std::fs::read(&path).unwrap();
    let mut witness = [0; 64];
    if rustix::fs::getxattr(&path, "user.relet.opening", &mut witness[..]).is_err() {
        eprintln!("skipped: this file system has no extended attributes");
        return;
    }
    let ada = open(&path).unwrap().worker("ada").unwrap().claim("mail").unwrap().unwrap().receipt();
    std::fs::write(&path, &backup).unwrap();
    let store = open(&path).unwrap();
    let bob = store.worker("bob").unwrap().claim("mail").unwrap().unwrap();
    assert_ne!(ada, bob.receipt());
    assert!(store.ack(ada).is_err());
    bob.ack().unwrap();
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// What the original has issued may be settled there; here it is worth nothing, and its message is anyone's.
#[test]
fn a_receipt_of_the_original_is_worth_nothing_in_a_copy() {
    for by_backup in [false, true] {
        let dir = Dir::new("names");
        let path = made(&dir);
        let copy = dir.join("copy.db");
        let receipt = {
            let store = open(&path).unwrap();
            let receipt = store.detached("ada").unwrap().claim("mail").unwrap().unwrap().receipt();
            if by_backup {
                store.backup(&copy).unwrap();
            }
            receipt
        };
        if !by_backup {
            std::fs::copy(&path, &copy).unwrap();
        }
        let copied = open(&copy).unwrap();
        assert!(matches!(copied.ack(receipt), Err(Error::Stale { .. })), "{by_backup}");
        copied.worker("bob").unwrap().claim("mail").unwrap().expect("it is anyone's").ack().unwrap();
        assert!(open(&path).unwrap().ack(receipt).is_ok());
    }
}

/// The path of a connection may lead to the store, and what it has open may be the file that was there before.
#[test]
fn a_transaction_on_the_file_that_was_there_before_is_not_one_on_the_store() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let mut before = plain(&path);
    number(&before, "SELECT count(*) FROM relet_messages");
    {
        let store = open(&path).unwrap();
        assert!(store.checkpoint().unwrap());
        std::fs::copy(&path, dir.join("new.db")).unwrap();
        std::fs::rename(dir.join("new.db"), &path).unwrap();
        assert!(matches!(store.queue("mail").enqueue("x"), Err(Error::FileReplaced { .. })));
    }
    // Its log lies there still, and is in use: the pages of one file would be written into the other.
    refused(&path, "log of another file");
    std::fs::remove_file(beside(&path, "-wal")).unwrap();
    std::fs::remove_file(beside(&path, "-shm")).unwrap();
    let store = open(&path).unwrap();
    let tx = before.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let told = store.queue("mail").enqueue_in(&tx, "astray");
    assert!(matches!(told, Err(Error::WrongFile { .. })), "{told:?}");
}

/// The command line, as another process.
fn relet(db: &Path, args: &str, input: &str) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_relet"))
        .arg("-d")
        .arg(db)
        .args(args.split(' '))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{args}");
}

fn moved(dir: &Dir, replace: impl FnOnce(&Path)) -> (Store, std::path::PathBuf) {
    let path = dir.join("store.db");
    let store = open(&path).unwrap();
    store.queue("mail").enqueue_all((0..10).map(|n| format!("{n}"))).unwrap();
    store.checkpoint().unwrap();
    store.queue("mail").enqueue("in the log").unwrap();
    replace(&path);
    (store, path)
}

/// B7: the moved file is another process's by now, whether its log went along or not.
#[test]
fn once_the_path_leads_elsewhere_nothing_is_written_any_more() {
    for gone in [&["", "-wal", "-shm"][..], &[""]] {
        let dir = Dir::new("names");
        let away = dir.join("away.db");
        let (store, path) = moved(&dir, |path| {
            for suffix in gone {
                std::fs::rename(beside(path, suffix), beside(&dir.join("away.db"), suffix)).unwrap();
            }
        });
        // Within this process SQLite would share the index of the old log with whoever opens the file under its new name.
        assert!(matches!(open(&away), Err(Error::Open { detail, .. }) if detail.contains("open in this process as")));
        relet(&away, "work mail --drain -- true", "");
        relet(&away, "enqueue theirs --lines", &"theirs\n".repeat(500));
        let before = std::fs::read(&away).unwrap();
        assert!(matches!(store.queue("mail").enqueue("x"), Err(Error::FileReplaced { .. })));
        assert!(matches!(store.stats(), Err(Error::FileReplaced { .. })));
        assert!(matches!(store.checkpoint(), Err(Error::FileReplaced { .. })));
        assert!(store.prune().is_err());
        drop(store);
        assert_eq!(std::fs::read(&away).unwrap(), before, "{gone:?}");
        assert!(!path.exists());
        let conn = Connection::open(&away).unwrap();
        assert_eq!(number(&conn, "SELECT count(*) FROM relet_messages WHERE queue = 2"), 500);
        assert_eq!(open(&away).unwrap().doctor().unwrap(), Vec::<String>::new());
    }
}

#[test]
fn a_log_that_was_deleted_or_replaced_is_told_before_anything_is_acknowledged() {
    for (suffix, replaced) in [("-wal", false), ("-wal", true), ("-shm", false), ("-shm", true)] {
        let dir = Dir::new("names");
        let (store, path) = moved(&dir, |path| {
            let side = beside(path, suffix);
            std::fs::remove_file(&side).unwrap();
            if replaced {
                std::fs::write(&side, "").unwrap();
            }
        });
        let told = store.queue("mail").enqueue("x").unwrap_err();
        assert!(matches!(&told, Error::FileReplaced { path: named } if *named == beside(&path, suffix)), "{told}");
        assert!(told.to_string().contains("before the path is opened again"), "{told}");
    }
}

#[test]
fn what_is_made_beside_takes_the_files_mode_whatever_the_umask() {
    for mode in [0o600, 0o640, 0o660, 0o664] {
        let dir = Dir::new("names");
        let path = made(&dir);
        support::chmod(&path, mode);
        // A child has the umask, since it is the whole process's; and it looks by itself, since what it makes it removes again.
        let (relet, folder, said) = (env!("CARGO_BIN_EXE_relet"), beside(&path, "-relet-workers"), dir.join("said"));
        let (db, folder, said) = (path.display(), folder.display(), said.display());
        let look = format!("stat -c %a {folder} {folder}/* > {said}");
        let script = format!("umask 077; {relet} -d {db} work mail --drain -- sh -c '{look}'");
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        let found = std::fs::read_to_string(dir.join("said")).unwrap();
        let search = (mode & 0o444) >> 2;
        assert_eq!(
            found,
            format!("{:o}\n{mode:o}\n{mode:o}\n", mode | search),
            "the folder, the store's lock, the worker's"
        );
    }
}

/// B2: an administrator ran one command, and the service could not start any more.
#[test]
fn what_an_administrator_makes_beside_is_the_files_owners() {
    let dir = Dir::new("names");
    if dir.path().metadata().unwrap().uid() != 0 {
        eprintln!("skipped: only an administrator can give files away");
        return;
    }
    let path = made(&dir);
    std::os::unix::fs::chown(&path, Some(4321), Some(4322)).unwrap();
    let store = Store::open(&path).unwrap(); // with a reserve
    let _worker = store.worker("root's").unwrap();
    let folder = beside(&path, "-relet-workers");
    let mut made: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(made.len(), 2, "the lock of the store, and the worker's");
    made.extend([folder, beside(&path, "-wal"), beside(&path, "-shm")]);
    for file in made {
        let owner = file.metadata().unwrap();
        assert_eq!((owner.uid(), owner.gid()), (4321, 4322), "{}", file.display());
    }
}

/// B1: `docker -v ./app.db:/data/app.db`: two logs beside one file.
#[test]
fn a_file_that_is_mounted_alone_is_refused() {
    let dir = Dir::new("names");
    let path = made(&dir);
    let inside = dir.folder("inside");
    std::fs::write(inside.join("store.db"), "").unwrap();
    let relet = env!("CARGO_BIN_EXE_relet");
    let mount = format!("mount --bind {} {}", path.display(), inside.join("store.db").display());
    let script = format!("{mount} || exit 99; exec {relet} -d {} stats", inside.join("store.db").display());
    for unshare in [["-m", "--"], ["-rm", "--"]] {
        let ran = Command::new("unshare").args(unshare).args(["sh", "-c", &script]).output();
        match ran {
            Ok(ran) if ran.status.code() != Some(99) && !String::from_utf8_lossy(&ran.stderr).contains("unshare") => {
                let said = String::from_utf8_lossy(&ran.stderr).into_owned();
                assert!(!ran.status.success() && said.contains("mount the folder that it lies in"), "{said}");
                return;
            }
            _ => {}
        }
    }
    eprintln!("skipped: nothing can be mounted here");
}
