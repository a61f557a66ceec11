//! A store is restored in one step: refused while anybody has it open, nothing of the old one left, and no receipt of it worth anything.
#![cfg(all(unix, feature = "cli", feature = "testing"))]

mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use relet::rusqlite::Connection;
use relet::{Error, Filter, Status, Store};
use support::{Dir, beside, chmod, mode, names, number, plain};

fn open(path: &Path) -> Store {
    Store::options().reserve(0).open(path).unwrap()
}

/// A store with these messages, the last of which are in its log only, as after a kill.
fn made(path: &Path, payloads: &[&str]) {
    let store = Store::options().reserve(0).checkpoints(false).open(path).unwrap();
    store.queue("mail").enqueue_all(payloads.iter().copied()).unwrap();
    drop(store);
    assert!(std::fs::metadata(beside(path, "-wal")).unwrap().len() > 0);
}

fn payloads(store: &Store) -> Vec<String> {
    let messages = store.list(&Filter::new().payload(true)).unwrap();
    messages.into_iter().map(|message| String::from_utf8(message.payload.unwrap()).unwrap()).collect()
}

fn relet(db: &Path, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_relet"));
    command.arg("-d").arg(db).args(args.split(' ')).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// All files of a folder and what is in them.
fn contents(folder: &Path) -> Vec<(PathBuf, u32)> {
    let files = names(folder).into_iter().map(|name| folder.join(name)).filter(|path| path.is_file());
    files
        .filter(|path| !path.ends_with("store.db-shm"))
        .map(|path| (path.clone(), crc32fast::hash(&std::fs::read(path).unwrap())))
        .collect()
}

/// A store, a backup of an earlier moment of it, and their folder.
fn with_backup() -> (Dir, PathBuf, PathBuf) {
    let dir = Dir::new("restore");
    let (path, copy) = (dir.join("store.db"), dir.join("copy.db"));
    let store = open(&path);
    store.queue("mail").enqueue("kept").unwrap();
    store.backup(&copy).unwrap();
    drop(store);
    made(&path, &["later"]);
    (dir, path, copy)
}

#[test]
fn what_is_restored_is_the_source_alone() {
    let (dir, path, copy) = with_backup();
    chmod(&path, 0o640);
    Store::restore(&copy, &path).unwrap();
    assert_eq!(names(dir.path()), ["copy.db", "store.db"], "nothing is left of the old one, nor of the work");
    assert_eq!(mode(&path), 0o640, "its users may still open it");
    let store = open(&path);
    assert_eq!(payloads(&store), ["kept"]);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    drop(store);
    // And by the command line.
    made(&path, &["later"]);
    let output = relet(&path, &format!("restore {}", copy.display()));
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), path.to_str().unwrap());
    assert_eq!(payloads(&open(&path)), ["kept"]);
}

#[test]
fn no_receipt_from_before_is_worth_anything() {
    let dir = Dir::new("restore");
    let (path, copy) = (dir.join("store.db"), dir.join("copy.db"));
    let store = open(&path);
    store.queue("mail").enqueue_all(["held before", "held after"]).unwrap();
    let ada = store.detached("ada").unwrap();
    let before = ada.claim("mail").unwrap().unwrap().receipt();
    store.backup(&copy).unwrap();
    let after = ada.claim("mail").unwrap().unwrap().receipt();
    drop((ada, store));
    Store::restore(&copy, &path).unwrap();
    let store = open(&path);
    let bob = store.worker("bob").unwrap();
    for _ in 0..2 {
        for receipt in [before, after] {
            assert!(matches!(store.ack(receipt), Err(Error::Stale { .. })), "{receipt}");
        }
        let claim = bob.claim("mail").unwrap().expect("what was held is anyone's");
        assert!(claim.receipt() != before && claim.receipt() != after);
        assert!(matches!(store.ack(before), Err(Error::Stale { .. })));
        drop(claim);
    }
}

#[track_caller]
fn refused(dir: &Dir, copy: &Path, path: &Path, because: &str) {
    let before = contents(dir.path());
    match Store::restore(copy, path) {
        Err(Error::InUse { detail, .. }) => assert!(detail.contains(because), "{detail}"),
        other => panic!("{other:?}"),
    }
    let output = Store::options().busy_wait(std::time::Duration::ZERO).restore(copy, path);
    assert!(matches!(output, Err(Error::InUse { .. })));
    assert_eq!(contents(dir.path()), before);
}

#[test]
fn a_store_that_is_open_is_not_replaced() {
    let (dir, path, copy) = with_backup();
    let store = open(&path);
    refused(&dir, &copy, &path, "this process");
    let output = relet(&path, &format!("restore {} --busy-wait 0s", copy.display()));
    assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    assert!(said(&output).contains("another process has it open; stop it, and call again"), "{}", said(&output));
    drop(store);
    let looking = Store::open_read_only(&path).unwrap();
    refused(&dir, &copy, &path, "this process");
    let output = relet(&path, &format!("restore {} --busy-wait 0s", copy.display()));
    assert_eq!(output.status.code(), Some(75), "one that looks may look again: {}", said(&output));
    drop(looking);
    // Any other program that has it open, such as SQLite's shell.
    let stranger = plain(&path);
    number(&stranger, "SELECT count(*) FROM relet_messages");
    let output = relet(&path, &format!("restore {} --busy-wait 0s", copy.display()));
    assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    assert_eq!(number(&stranger, "SELECT count(*) FROM relet_messages"), 2);
    drop(stranger);
    Store::restore(&copy, &path).unwrap();
    assert_eq!(payloads(&open(&path)), ["kept"]);
}

/// Its command goes on after a worker was killed, and may still settle.
#[test]
fn a_worker_that_lives_or_its_command_is_waited_for_by_nobody_and_refuses_the_restore() {
    let (dir, path, copy) = with_backup();
    let mut worker = Command::new(env!("CARGO_BIN_EXE_relet"))
        .arg("-d")
        .arg(&path)
        .args(["work", "mail", "-w", "w", "--", "sh", "-c", "echo $$; exec sleep 1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut pid = String::new();
    BufReader::new(worker.stdout.as_mut().unwrap()).read_line(&mut pid).unwrap();
    refused(&dir, &copy, &path, "another process");
    worker.kill().unwrap();
    worker.wait().unwrap();
    refused(&dir, &copy, &path, "a command that it has started");
    assert!(Command::new("kill").args(["-9", pid.trim()]).status().unwrap().success());
    support::eventually("its command is gone", || Store::restore(&copy, &path).is_ok());
    assert_eq!(payloads(&open(&path)), ["kept"]);
}

#[test]
fn what_is_no_good_source_changes_nothing() {
    let (dir, path, copy) = with_backup();
    let bad = dir.join("bad.db");
    let spoil = |how: &dyn Fn()| {
        let _ = std::fs::remove_file(&bad);
        how();
    };
    let text = || {
        std::fs::write(&bad, "this is a text, and long enough to be no database at all, whatever is read of it")
            .unwrap()
    };
    let empty = || std::fs::write(&bad, "").unwrap();
    let strange = || Connection::open(&bad).unwrap().execute_batch("CREATE TABLE t (a)").unwrap();
    let cut = || {
        let whole = std::fs::read(&copy).unwrap();
        std::fs::write(&bad, &whole[..whole.len() / 2]).unwrap();
    };
    let newer = || {
        std::fs::copy(&copy, &bad).unwrap();
        plain(&bad).execute_batch("UPDATE relet_meta SET value = 99 WHERE key = 'schema_version'").unwrap();
    };
    let folder = || std::fs::create_dir(&bad).unwrap();
    let cases: [(&dyn Fn(), &str); 7] = [
        (&|| (), "there is no file"),
        (&text, "cannot be read"),
        (&empty, "is no relet store"),
        (&strange, "is no relet store"),
        (&cut, "damaged"),
        (&newer, "schema"),
        (&folder, "it is a folder"),
    ];
    for (how, because) in cases {
        spoil(how);
        let before = contents(dir.path());
        let error = Store::restore(&bad, &path).unwrap_err().to_string();
        assert!(
            error.contains(because) || because == "damaged" && error.contains("cannot be read"),
            "{because}: {error}"
        );
        assert_eq!(contents(dir.path()), before, "{because}");
    }
    let before = contents(dir.path());
    assert!(Store::restore(&path, &path).unwrap_err().to_string().contains("this very file"));
    assert_eq!(contents(dir.path()), before);
    assert_eq!(payloads(&open(&path)), ["kept", "later"]);
}

#[test]
fn what_is_no_store_is_not_replaced_and_where_nothing_is_one_is_made() {
    let (dir, path, copy) = with_backup();
    let strange = dir.join("strange.db");
    Connection::open(&strange).unwrap().execute_batch("CREATE TABLE t (a)").unwrap();
    let error = Store::restore(&copy, &strange).unwrap_err();
    assert!(error.to_string().contains("no relet store; move it away"), "{error}");
    let text = dir.join("text");
    std::fs::write(
        &text,
        "a letter to grandmother, which is the only copy there is of it, and longer than a header of SQLite",
    )
    .unwrap();
    let error = Store::restore(&copy, &text).unwrap_err();
    assert!(error.to_string().contains("no SQLite database; move it away"), "{error}");
    assert!(std::fs::read(&text).unwrap().starts_with(b"a letter"));

    let new = dir.join("new.db");
    std::fs::write(beside(&new, "-wal"), "somebody's log").unwrap();
    let error = Store::restore(&copy, &new).unwrap_err();
    assert!(error.to_string().contains("lies there without its file"), "{error}");
    std::fs::remove_file(beside(&new, "-wal")).unwrap();
    Store::restore(&copy, &new).unwrap();
    assert_eq!(payloads(&open(&new)), ["kept"]);
    // A store that is in use is as good a source as a backup.
    let store = open(&path);
    store.queue("mail").enqueue("just now").unwrap();
    Store::restore(&path, &new).unwrap();
    assert_eq!(payloads(&open(&new)), ["kept", "later", "just now"]);
    assert_eq!(payloads(&store).len(), 3);
}

#[test]
fn a_damaged_store_is_replaced() {
    let (_dir, path, copy) = with_backup();
    drop(open(&path));
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[100..end].fill(0xab);
    std::fs::write(&path, &bytes).unwrap();
    assert!(Store::open(&path).is_err());
    Store::restore(&copy, &path).unwrap();
    assert_eq!(payloads(&open(&path)), ["kept"]);
}

/// H3: a backup was copied over the file while the log of the file before lay beside it. No command named the log, or the way out.
#[test]
fn a_log_that_has_damaged_a_copy_is_named_with_the_way_out() {
    let dir = Dir::new("restore");
    let (path, copy) = (dir.join("store.db"), dir.join("copy.db"));
    let small = open(&dir.join("small.db"));
    small.queue("mail").enqueue("kept").unwrap();
    small.backup(&copy).unwrap();
    {
        // Of this one, many pages are in the log, and they are others in the copy.
        let store = Store::options().reserve(0).checkpoints(false).open(&path).unwrap();
        store.queue("mail").enqueue_all((0..20_000).map(|n| format!("a message {n}"))).unwrap();
        store.checkpoint().unwrap();
        for id in 1..2_000 {
            store.cancel(id * 10).unwrap();
        }
    }
    let log = beside(&path, "-wal");
    assert!(std::fs::metadata(&log).unwrap().len() > 0);
    let wal = std::fs::read(&log).unwrap();
    std::fs::copy(&copy, &path).unwrap();
    for command in ["stats", "list", "enqueue mail x", "claim mail -w w", "doctor", "export", "prune"] {
        std::fs::copy(&copy, &path).unwrap();
        std::fs::write(&log, &wal).unwrap();
        let _ = std::fs::remove_file(beside(&path, "-shm"));
        let output = relet(&path, command);
        let said = said(&output);
        assert!(!output.status.success(), "{command}");
        assert!(said.contains(log.to_str().unwrap()) && said.contains("`relet restore SRC`"), "{command}: {said}");
    }
    let output = relet(&path, &format!("restore {}", copy.display()));
    assert!(output.status.success(), "{}", said(&output));
    let store = open(&path);
    assert_eq!(payloads(&store), ["kept"]);
    assert_eq!(store.list(&Filter::new().status(Status::Pending)).unwrap().len(), 1);
}
