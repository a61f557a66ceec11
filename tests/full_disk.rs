//! A disk without room: whatever is stored can still be opened, looked at, claimed, settled and removed, by processes that start
//! then, and a small disk holds a small store.
//!
//! The disk is a real one, a `tmpfs` of a few MiB in a mount namespace of its own. Where such a thing cannot be had, the tests
//! say so and do nothing.
#![cfg(all(target_os = "linux", feature = "cli"))]

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs a shell script in a fresh folder `$D`, on a disk of so many KiB; `relet` is the command line. `None`: there is no such disk.
fn on_a_disk_of(kib: u32, script: &str) -> Option<String> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("relet-full-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let run = |script: &str| -> Output {
        let mut command = Command::new("unshare");
        command.args(["-rm", "bash", "-c", script]).env("D", &folder).env("R", relet());
        command.env("RELET_DB", folder.join("app.db")).output().unwrap_or_else(|error| panic!("unshare: {error}"))
    };
    let mount = format!("mount -t tmpfs -o size={kib}k none $D || exit 99; cd $D; relet() {{ \"$R\" \"$@\"; }};");
    let there = Command::new("unshare").arg("--version").output().is_ok() && run(&mount).status.success();
    // Which command it was that failed is told by the trace, which is not on the small disk.
    let trace = folder.with_extension("trace");
    let begin = format!("exec 19>{}; BASH_XTRACEFD=19; set -eux", trace.display());
    let output = there.then(|| run(&format!("{begin}\n{mount}\n{script}")));
    let _ = std::fs::remove_dir(&folder);
    let traced = std::fs::read_to_string(&trace).unwrap_or_default();
    let _ = std::fs::remove_file(&trace);
    let Some(output) = output else {
        eprintln!("skipped: a small file system cannot be mounted here (`unshare -rm`, `mount -t tmpfs`)");
        return None;
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {script}\n--- {out}\n--- {err}\n--- {traced}", output.status);
    Some(format!("{out}{err}"))
}

fn relet() -> PathBuf {
    env!("CARGO_BIN_EXE_relet").into()
}

/// Enqueues until there is no room, then takes the last byte as well. The processes are killed, so that the log stays.
const FILL: &str = r#"
seq 100000 | sed 's/$/ a line that is long enough to fill a small disk soon, since a message of some length is stored/' > /dev/shm/relet-lines.$$
relet enqueue mail --lines=text < /dev/shm/relet-lines.$$ >/dev/null 2>/dev/shm/relet-said.$$ && { echo "it never got full"; exit 1; }
rm /dev/shm/relet-lines.$$; cat /dev/shm/relet-said.$$; rm /dev/shm/relet-said.$$
head -c 100M /dev/zero > ballast 2>/dev/null && { echo "the disk took 100 MB"; exit 1; }
test "$(df --output=avail . | tail -1)" -eq 0
"#;

fn full(kib: u32, then: &str) -> Option<String> {
    on_a_disk_of(kib, &format!("{FILL}\n{then}"))
}

#[test]
fn every_command_opens_a_full_disk() {
    for command in
        ["stats", "list", "doctor", "resume mail", "claim mail -w me", "dead purge --older-than 0s", "prune", "why 1"]
    {
        full(12 << 10, &format!("relet {command} >/dev/null"));
    }
}

#[test]
fn a_full_disk_is_drained_by_a_worker_that_starts_then() {
    full(
        12 << 10,
        r#"
timeout 3 "$R" work mail -w me -- true || test $? -eq 124
test "$(relet list --json | wc -l)" -gt 0
for i in $(seq 20); do
  relet claim mail -w me --json > /dev/shm/claimed.$$
  relet ack "$(sed 's/.*"receipt":"\([^"]*\)".*/\1/' /dev/shm/claimed.$$)" > /dev/null
done
rm /dev/shm/claimed.$$
relet doctor"#,
    );
}

#[test]
fn a_small_disk_holds_a_small_store() {
    on_a_disk_of(
        3 << 10,
        r#"
seq 200 | relet enqueue mail --lines=text > /dev/null
relet stats > /dev/null
for i in $(seq 20); do relet claim mail -w me --json > /dev/null; done
relet prune > /dev/null
relet doctor"#,
    );
}

#[test]
fn the_error_of_a_full_disk_says_what_is_free_needed_and_set_aside() {
    if let Some(text) = full(12 << 10, "true") {
        for part in ["disk is full", "are free on it", "are needed", "set aside"] {
            assert!(text.contains(part), "{text:?} says nothing of {part:?}");
        }
    }
    if let Some(text) = on_a_disk_of(64, "relet enqueue mail x 2>&1 && exit 1; true") {
        assert!(text.contains("1048576 are needed"), "{text}");
    }
}

#[test]
fn two_processes_that_create_a_store_set_room_aside_once() {
    on_a_disk_of(
        8600,
        r#"
for i in $(seq 20); do
  relet enqueue mail one > out.1 2>&1 & a=$!
  relet enqueue mail two > out.2 2>&1 & b=$!
  wait $a || { cat out.1; exit 1; }
  wait $b || { cat out.2; exit 1; }
  test "$(ls | grep -c relet-reserve)" -eq 1
  rm -r app.db*
done"#,
    );
}

#[test]
fn what_a_kill_has_left_of_a_reserve_is_used_and_what_is_not_relets_is_left_alone() {
    on_a_disk_of(
        32 << 10,
        r#"
relet enqueue mail x >/dev/null
size=$(stat -c %s app.db-relet-reserve)
# Half of one, as a kill leaves it behind.
head -c 100000 app.db-relet-reserve > app.db-relet-reserve.part; rm app.db-relet-reserve
relet enqueue mail x >/dev/null
test ! -e app.db-relet-reserve.part
test "$(stat -c %s app.db-relet-reserve)" -eq "$size"
# Others' files under its name.
for foreign in 'cp precious' 'ln -s precious' 'ln precious' 'mkfifo'; do
  echo precious > precious; cp precious kept
  for name in app.db-relet-reserve app.db-relet-reserve.part; do
    rm -f app.db-relet-reserve*
    case $foreign in mkfifo) mkfifo $name;; *) $foreign $name;; esac
    before=$(stat -c '%i %F %s' $name)
    timeout 20 "$R" enqueue mail x >/dev/null
    timeout 20 "$R" stats >/dev/null
    test "$(stat -c '%i %F %s' $name)" = "$before"
    cmp precious kept
  done
done"#,
    );
}

#[test]
fn the_reserve_is_the_files_own_and_has_its_mode() {
    let folder = std::env::temp_dir().join(format!("relet-full-own-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("app.db");
    let reserve = folder.join("app.db-relet-reserve");
    let size = || std::fs::metadata(&reserve).map_or(0, |file| file.len());
    drop(relet::Store::options().reserve(0).open(&path).unwrap());
    let listed = Command::new(relet()).args(["enqueue", "mail", "x", "-d"]).arg(&path).output().unwrap();
    assert!(listed.status.success() && size() == 0, "{listed:?}, {} bytes are set aside", size());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    drop(relet::Store::options().reserve(200_000).open(&path).unwrap());
    assert_eq!(size(), 200_000);
    assert_eq!(std::fs::metadata(&reserve).unwrap().permissions().mode() & 0o777, 0o640);
    drop(relet::Store::options().reserve(0).open(&path).unwrap());
    assert_eq!(size(), 0);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A limit on the size of files is a full disk like any other. The signal that comes with it is ignored here by the shell.
#[test]
fn a_limit_on_the_size_of_files_counts_as_full() {
    if let Some(text) = on_a_disk_of(
        64 << 10,
        r#"
relet enqueue mail first > /dev/null
trap '' XFSZ
ulimit -f 6000
seq 200000 | sed 's/$/ a line that is long enough to fill a small disk soon, since a message of some length is stored/' |
  relet enqueue mail --lines=text 2>&1 >/dev/null && exit 1
relet claim mail -w me --json >/dev/null"#,
    ) {
        assert!(text.contains("disk is full"), "{text}");
    }
}

/// A commit that was larger than what is set aside could be written into the log, and never be moved from there into the file.
#[test]
fn what_is_stored_on_a_small_disk_in_large_commits_drains_when_the_last_byte_is_taken() {
    on_a_disk_of(
        3 << 10,
        r#"
seq 4000 | sed "s/$/$(printf ' long%.0s' $(seq 300))/" |
  relet enqueue mail --lines=text >/dev/null 2>&1 && { echo "it never got full"; exit 1; }
head -c 1300000 /dev/zero | relet enqueue large - >/dev/null 2>&1 && { echo "it found room"; exit 1; }
cat /dev/zero > ballast 2>/dev/null && exit 1
before=$(relet list --limit 1 --json | wc -l)
test "$before" -eq 1
timeout 120 "$R" work mail --drain -- true >/dev/null 2>&1
relet stats --json | grep -q '"pending":0'
relet doctor >/dev/null"#,
    );
    on_a_disk_of(
        3 << 10,
        r#"
relet enqueue mail first >/dev/null
# It fits into the log, and not into the file beside the log.
head -c 1300000 /dev/urandom | base64 -w0 | head -c 1400000 > large
relet enqueue large - < large >/dev/null 2>said && { rm large; relet claim large -w me >/dev/null; exit 0; }
grep -q "disk is full" said
rm large
timeout 60 "$R" work mail --drain -- true >/dev/null 2>&1
relet doctor >/dev/null"#,
    );
}

/// There is no room for the copy beside the old one: that stays, whole.
#[test]
fn a_restore_without_room_leaves_the_old_store() {
    on_a_disk_of(
        12 << 10,
        r#"
S=/dev/shm/relet-source.$$; trap 'rm -f $S $S.*' EXIT
head -c 3000000 /dev/zero | tr '\0' x > payload
relet -d $S enqueue big - < payload >/dev/null 2>&1
relet -d $S backup $S.copy >/dev/null
rm payload
seq 500 | relet enqueue mail --lines=text 2>/dev/null
head -c 100M /dev/zero > ballast 2>/dev/null && { echo "the disk took 100 MB"; exit 1; }

relet restore $S.copy 2>$S.said && { echo "it found room"; exit 1; }
grep -q full $S.said || { cat $S.said; exit 1; }
test -z "$(ls | grep part)" || { ls; exit 1; }
relet list --limit 1000 --json | wc -l | grep -qx 500
relet doctor >/dev/null
# With room it goes through.
rm ballast
relet restore $S.copy >/dev/null
relet list --json | grep -c '"queue":"big"' | grep -qx 1
relet doctor >/dev/null
"#,
    );
}
