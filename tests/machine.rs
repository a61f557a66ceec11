//! Who says that the machine was restarted: processes that see it in another way work together, and only what is certain ends a claim.
//!
//! The views are real namespaces of Linux. Where the machine does not allow them, the test says so and checks nothing.
#![cfg(all(target_os = "linux", feature = "cli", feature = "testing"))]

mod support;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use relet::{Filter, Snapshot, Status, Store};
use support::{Dir, eventually, number, plain};

/// A way to see the machine: options of `unshare`, and what is done before the command is run.
#[derive(Clone, Copy)]
struct View {
    name: &'static str,
    unshare: &'static [&'static str],
    first: &'static str,
}

const NO_ID: View =
    View { name: "no boot id", unshare: &["-m"], first: "mount --bind /dev/null /proc/sys/kernel/random/boot_id" };
const ANOTHER_ID: View =
    View { name: "another boot id", unshare: &["-m"], first: "mount --bind $DIR/id /proc/sys/kernel/random/boot_id" };
const NO_PROC: View = View { name: "no /proc", unshare: &["-m"], first: "mount -t tmpfs none /proc" };
const ITS_OWN_PIDS: View =
    View { name: "its own process ids", unshare: &["-m", "-p", "-f", "--mount-proc"], first: "true" };
const PIDS_ONLY: View =
    View { name: "a hardened /proc", unshare: &["-m"], first: "mount -t proc -o subset=pid proc /proc" };
const AHEAD: View = View {
    name: "a clock that is ahead",
    unshare: &["-T", "-f", "--monotonic", "100000", "--boottime", "100000"],
    first: "true",
};
const BEHIND: View = View {
    name: "a clock that is behind",
    unshare: &["-T", "-f", "--monotonic", "-500", "--boottime", "-500"],
    first: "true",
};
const VIEWS: [View; 7] = [NO_ID, ANOTHER_ID, NO_PROC, ITS_OWN_PIDS, PIDS_ONLY, AHEAD, BEHIND];

/// Clocks that cannot be compared: nothing tells by how much they differ.
const STRANGE: [View; 3] = [
    View {
        name: "ahead, and no /proc",
        unshare: &["-m", "-T", "-f", "--monotonic", "100000", "--boottime", "100000"],
        first: "mount -t tmpfs none /proc",
    },
    View {
        name: "behind, and no /proc",
        unshare: &["-m", "-T", "-f", "--monotonic", "-500", "--boottime", "-500"],
        first: "mount -t tmpfs none /proc",
    },
    View {
        name: "awake for longer, and no /proc",
        unshare: &["-m", "-T", "-f", "--monotonic", "100000"],
        first: "mount -t tmpfs none /proc",
    },
];

struct Place {
    dir: Dir,
}

impl Place {
    fn new() -> Place {
        let dir = Dir::new("machine");
        std::fs::write(dir.join("id"), "01234567-89ab-cdef-0123-456789abcdef\n").unwrap();
        Place { dir }
    }

    fn db(&self) -> PathBuf {
        self.dir.join("a.db")
    }

    /// The command line, as a process with this view of the machine runs it.
    fn command(&self, view: Option<View>, args: &str) -> Command {
        let relet = format!("exec {} -d {} {args}", env!("CARGO_BIN_EXE_relet"), self.db().display());
        let mut command = match view {
            None => Command::new("sh"),
            Some(view) => {
                let mut command = Command::new("unshare");
                command.args(view.unshare).args(["--", "sh"]);
                command
            }
        };
        let first = view.map_or("true", |view| view.first);
        command.args(["-c", &format!("{first} || exit 99; {relet}")]).env("DIR", self.dir.path());
        command
    }

    fn run(&self, view: Option<View>, args: &str) -> Output {
        self.command(view, args).output().unwrap()
    }

    fn ok(&self, view: Option<View>, args: &str) -> String {
        let ran = self.run(view, args);
        assert!(ran.status.success(), "{}: {args}: {}", name(view), String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    }

    fn nothing(&self, view: Option<View>, args: &str) {
        let ran = self.run(view, args);
        assert_eq!(ran.status.code(), Some(3), "{}: {args}: {}", name(view), String::from_utf8_lossy(&ran.stdout));
    }

    fn epoch(&self) -> i64 {
        number(&plain(&self.db()), "SELECT value FROM relet_meta WHERE key = 'epoch'")
    }

    fn message(&self, id: i64) -> Option<Snapshot> {
        Store::open_read_only(self.db()).unwrap().show(id).unwrap()
    }

    /// Whether this machine allows such a view.
    fn allows(&self, view: View) -> bool {
        let mut command = Command::new("unshare");
        command.args(view.unshare).args(["--", "sh", "-c", view.first]).env("DIR", self.dir.path());
        let allowed = command.output().is_ok_and(|ran| ran.status.success());
        if !allowed {
            eprintln!("skipped: {}: this machine does not allow it", view.name);
        }
        allowed
    }
}

fn name(view: Option<View>) -> &'static str {
    view.map_or("outside", |view| view.name)
}

/// A service that has claimed a message, and works on it until it is told to go on.
struct Service<'p> {
    place: &'p Place,
    child: Child,
}

impl Service<'_> {
    fn start(place: &Place, view: Option<View>) -> Service<'_> {
        let go = place.dir.join("go");
        let _ = std::fs::remove_file(&go);
        let (here, go) = (place.dir.path().display(), go.display());
        let wait = format!("echo begun; while [ -d {here} ] && ! [ -e {go} ]; do sleep 0.02; done");
        let args = format!("work q -w SVC --lease 2s -- sh -c '{wait}'");
        let mut command = place.command(view, &args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "begun", "{}", name(view));
        Service { place, child }
    }

    fn finish(mut self, view: Option<View>) {
        std::fs::write(self.place.dir.join("go"), "").unwrap();
        eventually("it is acked", || self.place.message(1).is_none());
        let _ = Command::new("kill").args(["-TERM", &format!("{}", self.child.id())]).status();
        if view.is_some_and(|view| view.unshare.contains(&"-f")) {
            // `unshare -f` hands signals on to nobody: its child is the command.
            let _ = Command::new("pkill").args(["-TERM", "-P", &format!("{}", self.child.id())]).status();
        }
        self.child.wait().unwrap();
    }
}

fn sound(place: &Place) {
    assert_eq!(Store::open(place.db()).unwrap().doctor().unwrap(), Vec::<String>::new());
}

/// A1: a hardened service was taken for the time before a reboot by whoever looked from outside, and the other way round.
#[test]
fn whoever_sees_the_machine_in_another_way_takes_nothing_from_those_who_are_there() {
    for view in VIEWS {
        let place = Place::new();
        if !place.allows(view) {
            continue;
        }
        for (service, other) in [(Some(view), None), (None, Some(view)), (Some(view), Some(NO_ID))] {
            let place = Place::new();
            place.ok(service, "enqueue q one");
            let running = Service::start(&place, service);
            let epoch = place.epoch();
            place.ok(other, "enqueue q two");
            assert!(place.ok(other, "claim q -w OTHER").contains("two"), "{} {}", name(service), name(other));
            place.nothing(other, "claim q -w OTHER");
            place.ok(other, "stats");
            let held = place.message(1).unwrap();
            assert_eq!((held.status, held.worker.as_deref(), held.crashes), (Status::Processing, Some("SVC"), 0));
            assert_eq!(place.epoch(), epoch, "{} {}", name(service), name(other));
            running.finish(service);
            sound(&place);
        }
    }
}

/// A2: a lease is read on the clock that it was written on, whatever a time namespace adds to that.
#[test]
fn a_lease_is_as_long_in_every_view() {
    for view in VIEWS {
        let place = Place::new();
        if !place.allows(view) {
            continue;
        }
        for (holder, other) in [(Some(view), None), (None, Some(view))] {
            // Somebody is there all the time, so that no restart comes into question.
            let place = Place::new();
            let _there = Store::open(place.db()).unwrap();
            place.ok(None, "enqueue q one");
            place.ok(holder, "claim q -w HOLDER --lease 1h");
            place.nothing(other, "claim q -w OTHER");
            let shown = place.ok(other, "show 1 --json");
            let left: u64 =
                shown.split("\"lease_left_ms\":").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
            assert!((3_500_000..=3_600_000).contains(&left), "{} {}: {left}", name(holder), name(other));
        }
    }
}

#[test]
fn a_clock_that_cannot_be_compared_is_refused_and_the_holder_named() {
    for view in STRANGE {
        let place = Place::new();
        if !place.allows(view) {
            continue;
        }
        place.ok(None, "enqueue q one");
        let running = Service::start(&place, None);
        let ran = place.run(Some(view), "enqueue q two");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(
            !ran.status.success() && said.contains("\"SVC\"") && said.contains("mount /proc"),
            "{}: {said}",
            view.name
        );
        running.finish(None);
        assert!(Store::open(place.db()).unwrap().list(&Filter::new()).unwrap().is_empty());
    }
}

/// Another boot: the clocks begin again. (Here, what was noted of them is moved, since the machine stays up.)
fn as_if_restarted(place: &Place) {
    let sql = "UPDATE relet_meta SET value = value + 1000000000 WHERE key = 'seen_awake'";
    plain(&place.db()).execute(sql, []).unwrap();
}

/// What is certain: nobody is there, the boot id is another one, and the clocks have begun again.
#[test]
fn a_restart_is_still_noticed() {
    let place = Place::new();
    if !place.allows(ANOTHER_ID) {
        return;
    }
    place.ok(None, "enqueue q one");
    place.ok(None, "claim q -w HOLDER --lease 1h");
    let epoch = place.epoch();
    as_if_restarted(&place);
    assert!(place.ok(Some(ANOTHER_ID), "claim q -w OTHER").contains("one"));
    assert_eq!((place.epoch(), place.message(1).unwrap().crashes), (epoch + 1, 1));
    sound(&place);
}

/// Nobody can tell: then no receipt is issued twice, and no claim is taken away whose lease can be right.
#[test]
fn where_nobody_can_tell_a_new_epoch_begins_and_leases_stand() {
    for view in [NO_ID, NO_PROC] {
        let place = Place::new();
        if !place.allows(view) {
            continue;
        }
        place.ok(None, "enqueue q one");
        place.ok(None, "claim q -w HOLDER --lease 1h");
        let epoch = place.epoch();
        place.nothing(Some(view), "claim q -w OTHER");
        assert_eq!(place.epoch(), epoch + 1, "{}", view.name);
        // A lease that is longer than it was made is one of another clock.
        plain(&place.db()).execute("UPDATE relet_messages SET place = place + 3600000 WHERE line = -1", []).unwrap();
        assert!(place.ok(Some(view), "claim q -w OTHER").contains("one"), "{}", view.name);
        sound(&place);
    }
}

/// Containers with boot ids of their own, of which none stays: their clocks go on, so that nobody takes from the others.
#[test]
fn two_boot_ids_by_turns_are_no_restart() {
    let place = Place::new();
    if !place.allows(ANOTHER_ID) {
        return;
    }
    place.ok(None, "enqueue q one");
    place.ok(None, "claim q -w HOLDER --lease 1h");
    for view in [Some(ANOTHER_ID), None, Some(NO_ID), Some(ANOTHER_ID), None] {
        place.nothing(view, "claim q -w OTHER");
        place.ok(view, "stats");
    }
    assert_eq!(place.message(1).unwrap().crashes, 0);
    sound(&place);
}

/// A gate's rate goes on, too: its bucket is not emptied by each look of a process that sees no boot id.
#[test]
fn a_rate_is_not_charged_for_what_nobody_can_tell() {
    let place = Place::new();
    if !place.allows(NO_ID) {
        return;
    }
    place.ok(Some(NO_ID), "gate set api --rate 1000/1000s --burst 1000");
    for n in 0..3 {
        place.ok(Some(NO_ID), &format!("enqueue q {n} --gate api"));
    }
    for _ in 0..3 {
        place.ok(Some(NO_ID), "claim q -w W");
    }
}

/// A worker's lock that a command has inherited outlives the worker, and is a proof like any other.
#[test]
fn a_command_that_outlives_its_worker_is_somebody_who_is_there() {
    let place = Place::new();
    if !place.allows(ANOTHER_ID) {
        return;
    }
    place.ok(None, "enqueue q one");
    let mut running = Service::start(&place, None);
    running.child.kill().unwrap(); // SIGKILL: its command goes on
    running.child.wait().unwrap();
    let epoch = place.epoch();
    place.ok(Some(ANOTHER_ID), "enqueue q two");
    assert_eq!(place.epoch(), epoch);
    std::fs::write(place.dir.join("go"), "").unwrap();
}

/// Somebody may remove relet's folder. Then nobody knows of those who are there; they learn it in their next transaction.
#[test]
fn a_running_process_learns_that_its_claims_were_voided() {
    let place = Place::new();
    if !place.allows(ANOTHER_ID) {
        return;
    }
    let store = Store::open(place.db()).unwrap();
    store.queue("q").enqueue_all(["one", "two"]).unwrap();
    let worker = store.worker("w").unwrap();
    let detached = store.detached("d").unwrap();
    let (claim, theirs) = (worker.claim("q").unwrap().unwrap(), detached.claim("q").unwrap().unwrap());
    assert_eq!(claim.receipt().epoch(), 1);
    std::fs::remove_dir_all(support::beside(&place.db(), "-relet-workers")).unwrap();
    as_if_restarted(&place);
    place.ok(Some(ANOTHER_ID), "enqueue q three");
    assert!(claim.extend(std::time::Duration::from_secs(60)).is_err());
    assert!(theirs.extend(std::time::Duration::from_secs(60)).is_err());
    assert!(matches!(worker.claim("q"), Err(relet::Error::Superseded { .. })));
    assert_eq!(detached.claim("q").unwrap().unwrap().receipt().epoch(), 2, "and every receipt is of the new epoch");
}
