//! A command is run for each message, and what becomes of it becomes of the message.
#![cfg(all(feature = "cli", unix))]

mod command;

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use command::{PATIENCE, Place, Ran, closed_pipe, lines_of, relet, run};
use relet::{Error, MessageId, Status};
use serde_json::{Value, json};

const LEASE: Duration = Duration::from_millis(200);

/// `relet work` with these options, running a shell script whose $0 is the test's folder.
fn work(place: &Place, options: &str, script: &str) -> Command {
    let mut args: Vec<OsString> = vec!["-d".into(), place.db().into(), "work".into()];
    args.extend(options.split_whitespace().map(OsString::from));
    args.extend(["--", "sh", "-c", script].map(OsString::from));
    args.push(place.folder.clone().into());
    relet(args)
}

/// The same until the queues are empty.
fn drain(place: &Place, options: &str, script: &str) -> Ran {
    let mut process = Process(work(place, &format!("{options} --drain"), script).spawn().unwrap());
    let (out, err) = (all_of(process.0.stdout.take()), all_of(process.0.stderr.take()));
    let code = process.end();
    let ran = Ran { code, out: out.join().unwrap(), err: String::from_utf8_lossy(&err.join().unwrap()).into_owned() };
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran
}

fn all_of(stream: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    let mut stream = stream.unwrap();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Killed at the end of its test, if it still runs then.
struct Process(Child);

impl Process {
    fn end(&mut self) -> i32 {
        until(|| self.0.try_wait().unwrap()).code().expect("it ended by itself")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `relet work` that goes on, and what it says.
struct Working {
    process: Process,
    out: Receiver<String>,
    err: Receiver<String>,
}

impl Working {
    fn start(mut command: Command) -> Working {
        let mut process = command.spawn().unwrap();
        let (out, err) = (lines_of(process.stdout.take().unwrap()), lines_of(process.stderr.take().unwrap()));
        Working { process: Process(process), out, err }
    }

    /// The next line that a command says.
    fn hear(&self) -> String {
        self.out.recv_timeout(PATIENCE).expect("a line on stdout")
    }

    /// The next line of relet's own with this in it.
    fn hear_of(&self, text: &str) -> String {
        let lines = std::iter::from_fn(|| self.err.recv_timeout(PATIENCE).ok());
        lines.into_iter().find(|line| line.contains(text)).unwrap_or_else(|| panic!("a line with {text:?} on stderr"))
    }

    fn signal(&self, name: &str) {
        signal(self.process.0.id(), name);
    }

    fn end(&mut self) -> i32 {
        self.process.end()
    }
}

/// Looks until there is something.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    const PAUSE: Duration = Duration::from_millis(5);
    let looks = (0..PATIENCE.as_millis() / PAUSE.as_millis()).map(|_| {
        std::thread::sleep(PAUSE);
        look()
    });
    looks.flatten().next().expect("it comes")
}

fn signal(pid: impl std::fmt::Display, name: &str) {
    assert!(Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap().success());
}

fn enqueue<P: Into<relet::Message>>(place: &Place, payloads: impl IntoIterator<Item = P>) -> Vec<MessageId> {
    let enqueued = place.store().queue("mail").enqueue_all(payloads).unwrap();
    enqueued.iter().map(|enqueued| enqueued.id()).collect()
}

fn error_of(place: &Place, id: i64) -> String {
    place.show(id)["last_error"].as_str().unwrap_or_default().to_owned()
}

/// It is back where it was: ready, and no attempt was counted.
fn is_back(place: &Place, id: i64) {
    let message = place.show(id);
    let of = |name: &str| message[name].clone();
    assert_eq!(
        (of("status"), of("attempts"), of("crashes"), of("due_at")),
        (json!("pending"), json!(0), json!(0), Value::Null)
    );
}

#[test]
fn the_exit_code_is_the_outcome() {
    let place = Place::new();
    enqueue(&place, ["exit 0", "exit 65", "exit 75", "exit 3", "kill -KILL $$", "exit 255"]);
    let ran = drain(&place, "mail --json --defer-for 1h", ". /dev/stdin");
    let rows: Vec<String> =
        ran.json().iter().map(|row| format!("{} {} {}", row["id"], row["outcome"], row["error"])).collect();
    assert_eq!(
        rows,
        [
            r#"1 "acked" null"#,
            r#"2 "rejected" "exit status: 65""#,
            r#"3 "deferred" "exit status: 75""#,
            r#"4 "failed" "exit status: 3""#,
            r#"5 "failed" "killed by signal 9 (SIGKILL)""#,
            r#"6 "failed" "exit status: 255""#,
        ]
    );
    place.fails("show 1", 3);
    assert_eq!(place.show(2)["status"], "dead");
    let deferred = place.show(3);
    assert_eq!((&deferred["attempts"], &deferred["deferrals"]), (&json!(0), &json!(1)));
    let left = deferred["due_at"].as_i64().unwrap() - deferred["enqueued_at"].as_i64().unwrap();
    assert!((3_600_000..7_200_000).contains(&left), "{left}");
    for (id, error) in [(4, "exit status: 3"), (5, "killed by signal 9 (SIGKILL)"), (6, "exit status: 255")] {
        let failed = place.show(id);
        assert_eq!((&failed["status"], &failed["attempts"]), (&json!("pending"), &json!(1)));
        assert_eq!(error_of(&place, id), error);
    }
}

#[test]
fn a_message_that_its_command_has_settled_itself_is_told_as_it_is() {
    for json in ["", "--json"] {
        let place = Place::new();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_relet"), place.path("relet")).unwrap();
        enqueue(&place, ["defer $RELET_RECEIPT --for 1h", "reject $RELET_RECEIPT --error e", "ack $RELET_RECEIPT"]);
        let ran = drain(&place, &format!("mail {json}"), r#"eval "$0/relet $(cat)" >&2; exit $((RELET_ID % 2 * 3))"#);
        place.ok("retry-queue");
        assert_eq!(place.show(1)["deferrals"], 1);
        if json.is_empty() {
            for (id, now) in [(1, "it is processing"), (2, "it is dead"), (3, "it is gone")] {
                let line = ran.err.lines().find(|line| line.starts_with(&format!("relet: message {id} of"))).unwrap();
                assert!(
                    line.contains(" settled by its command after ") && line.ends_with(&format!(", {now}")),
                    "{line}"
                );
            }
            continue;
        }
        let rows: Vec<_> = ran.json().into_iter().map(|row| (row["outcome"].clone(), row["status"].clone())).collect();
        let settled = |status: Value| (json!("settled"), status);
        assert_eq!(rows, [settled(json!("processing")), settled(json!("dead")), settled(Value::Null)]);
        assert!(ran.json().iter().all(|row| row.get("error").is_none()));
    }
}

#[test]
fn a_message_that_becomes_a_dead_letter_is_told_so() {
    let place = Place::new();
    place.ok("enqueue mail 3 --max-attempts 1");
    place.ok("enqueue mail 3");
    place.ok("enqueue mail 65");
    place.ok("enqueue mail 75 --max-deferrals 1");
    let ran = drain(&place, "mail --defer-for 0s", "exit $(cat)");
    let is_told: Vec<bool> = (1..=4)
        .map(|id| {
            let line = ran.err.lines().rfind(|line| line.starts_with(&format!("relet: message {id} of"))).unwrap();
            line.ends_with(", it is a dead letter now")
        })
        .collect();
    assert_eq!(is_told, [true, false, true, true], "{}", ran.err);
    assert_eq!(place.store().stats().unwrap().queues[0].count(Status::Dead), 3);
}

#[test]
fn what_it_says_on_stderr_is_the_error() {
    let place = Place::new();
    enqueue(&place, ["echo one >&2; echo two >&2; exit 3", "echo bad >&2; exit 65", "echo dying >&2; kill -KILL $$"]);
    let ran = drain(&place, "mail", ". /dev/stdin");
    assert_eq!((error_of(&place, 1).as_str(), error_of(&place, 2).as_str()), ("one\ntwo", "bad"));
    assert_eq!(error_of(&place, 3), "killed by signal 9 (SIGKILL)\ndying");
    assert!(ran.err.contains("one\ntwo\n") && ran.err.contains("relet: message 1 of \"mail\" failed after "));
    assert!(ran.text().is_empty());
}

#[test]
fn a_command_that_may_try_later_closes_the_gate_of_its_message() {
    let place = Place::new();
    place.ok("enqueue mail a --gate api");
    place.ok("enqueue mail b --gate api");
    place.ok("enqueue mail c");
    let script = r#"[ -z "$RELET_GATE" ] || exit 75"#;
    let rows = drain(&place, "mail --json --defer-for 1h", script).json();
    let rows: Vec<_> = rows.iter().map(|row| (row["id"].as_i64(), row["outcome"].as_str())).collect();
    assert_eq!(rows, [(Some(1), Some("limited")), (Some(3), Some("acked"))]);
    assert!(place.ok("why 2").line().contains("behind gate \"api\""));
    assert_eq!((&place.show(1)["attempts"], &place.show(2)["deferrals"]), (&json!(0), &json!(0)));
}

#[test]
fn its_stdin_is_the_payload_to_the_byte() {
    let place = Place::new();
    let large: Vec<u8> = (0..5_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let payloads = [(0..=255).collect(), large, Vec::new(), b"no line break".to_vec()];
    enqueue(&place, payloads.clone());
    drain(&place, "mail -j 2", r#"cat > "$0/$RELET_ID""#);
    for (id, payload) in (1..).zip(payloads) {
        assert!(std::fs::read(place.path(&id.to_string())).unwrap() == payload, "{id}");
    }
}

#[test]
fn its_environment_tells_about_the_message() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b --key k=1 --group g --gate api --priority -7");
    let mut command = work(&place, "mail --drain", r#"env | grep ^RELET_ | sort; echo"#);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RELET_")) {
        command.env_remove(name); // How these tests are run is not the question.
    }
    command.env("RELET_DB", place.db()).env("RELET_KEY", "of another").env("RELET_TICK_AT", "1");
    let ran = run(command, b"");
    let db = place.db().display().to_string();
    assert_eq!(
        ran.text(),
        format!(
            "RELET_ATTEMPT=1\nRELET_DB={db}\nRELET_ID=1\nRELET_PRIORITY=0\nRELET_QUEUE=mail\nRELET_RECEIPT=1.1\n\n\
             RELET_ATTEMPT=1\nRELET_DB={db}\nRELET_GATE=api\nRELET_GROUP=g\nRELET_ID=2\nRELET_KEY=k=1\n\
             RELET_PRIORITY=-7\nRELET_QUEUE=mail\nRELET_RECEIPT=2.1\n\n"
        )
    );
}

#[test]
fn a_command_finds_the_store_from_any_folder() {
    let place = Place::new();
    place.ok("enqueue mail a");
    let script = r#"cd /; "$0" enqueue more b"#;
    let mut command = relet(["-d", "queue.db", "work", "mail", "--drain", "--", "sh", "-c", script]);
    command.arg(env!("CARGO_BIN_EXE_relet")).current_dir(&place.folder);
    assert_eq!(run(command, b"").line(), "2");
}

#[test]
fn a_command_that_reads_nothing_holds_nobody_up() {
    let place = Place::new();
    let large = || vec![b'x'; 5 << 20];
    enqueue(&place, [large(), large()]);
    drain(&place, "mail", "if [ $RELET_ID = 1 ]; then exec <&-; else head -c 10 > /dev/null; fi");
    assert_eq!(place.store().stats().unwrap().queues[0].acked, 2);
}

#[test]
fn what_a_command_leaves_running_holds_nobody_up() {
    let place = Place::new();
    enqueue(&place, [vec![b'x'; 5 << 20]]);
    // It keeps all three pipes open.
    let ran = drain(&place, "mail", "exec 3<&0; sleep 1000 <&3 & echo $!");
    signal(ran.line(), "KILL");
    assert_eq!(place.store().stats().unwrap().queues[0].acked, 1);
}

#[test]
fn of_a_chatty_command_the_last_lines_are_kept() {
    let place = Place::new();
    enqueue(&place, ["a", "b"]);
    let script = r#"
        if [ $RELET_ID = 1 ]; then yes 0123456789 | head -n 1000000 >&2; else head -c 10000000 /dev/zero | tr '\0' x >&2; fi
        echo last >&2; exit 1"#;
    let ran = drain(&place, "mail", script);
    assert_eq!(error_of(&place, 1), "0123456789\n".repeat(19) + "last");
    let error = error_of(&place, 2);
    assert_eq!((error.len(), error.ends_with("xxx\nlast") || error.ends_with("xxxlast")), (4095, true));
    assert!(ran.err.len() > 21_000_000, "all of it was passed on: {}", ran.err.len());
}

#[test]
fn as_many_as_were_asked_for_run_at_once_and_each_speaks_in_whole_lines() {
    let place = Place::new();
    enqueue(&place, ["a", "b", "c", "d"]);
    // Each begins its line, then waits until all have.
    let script = r#"printf "begin $RELET_ID "; : > "$0/met-$RELET_ID"
        until [ -e "$0/met-1" ] && [ -e "$0/met-2" ] && [ -e "$0/met-3" ] && [ -e "$0/met-4" ]; do sleep 0.02; done
        printf "end $RELET_ID""#;
    let ran = drain(&place, "mail -j 4", script);
    let mut lines: Vec<_> = ran.text().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["begin 1 end 1", "begin 2 end 2", "begin 3 end 3", "begin 4 end 4"]);
}

#[test]
fn no_more_than_were_asked_for_run_at_once() {
    let place = Place::new();
    enqueue(&place, (0..12).map(|number| number.to_string()));
    // Of three at once, one would find two others.
    let script = r#": > "$0/runs-$RELET_ID"; ls "$0" | grep -c runs-; sleep 0.05; rm "$0/runs-$RELET_ID""#;
    let ran = drain(&place, "mail -j 2", script);
    let counts: Vec<u32> = ran.text().lines().map(|line| line.parse().unwrap()).collect();
    assert!(counts.len() == 12 && counts.iter().all(|count| *count <= 2), "{counts:?}");
}

#[test]
fn the_output_of_a_single_command_is_passed_on_to_the_byte() {
    let place = Place::new();
    let payload: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    enqueue(&place, [payload.clone(), payload.clone()]);
    assert!(drain(&place, "mail", "cat").out == [&payload[..], &payload[..]].concat());
}

#[test]
fn with_json_stdout_is_for_objects_alone() {
    let place = Place::new();
    enqueue(&place, ["a", "b"]);
    let ran = drain(&place, "mail --json", "echo talk; [ $RELET_ID = 1 ]");
    let rows = ran.json();
    let mut names: Vec<_> = rows[1].as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["attempts", "error", "id", "outcome", "queue", "receipt", "status", "took_ms"]);
    assert!(rows[0].get("error").is_none() && rows[0]["status"] == "done" && rows[0]["queue"] == "mail");
    assert_eq!((&rows[1]["receipt"], &rows[1]["status"]), (&json!("2.1"), &json!("pending")));
    assert_eq!(ran.err, "talk\ntalk\n");
}

#[test]
fn a_reader_that_goes_away_does_not_end_the_work() {
    for options in ["mail --drain", "mail --drain --json -j 2"] {
        let place = Place::new();
        enqueue(&place, ["a", "b", "c"]);
        let mut command = work(&place, options, "echo hello");
        command.stdout(closed_pipe());
        let ended = command.stderr(Stdio::null()).status().unwrap();
        assert_eq!(ended.code(), Some(0));
        assert_eq!(place.store().stats().unwrap().queues[0].acked, 3);
    }
}

#[test]
fn a_drained_queue_ends_the_work_and_what_waits_for_its_time_does_not_keep_it() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    place.ok("enqueue mail later --delay 1h");
    place.ok("enqueue orders b");
    // A command may enqueue more.
    let script = r#"echo "$RELET_QUEUE $RELET_ID"; [ $RELET_ID != 1 ] || "$0/relet" -d "$RELET_DB" enqueue mail c"#;
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_relet"), place.path("relet")).unwrap();
    let ran = drain(&place, "mail orders --weight orders=3", script);
    let mut lines: Vec<_> = ran.text().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["4", "mail 1", "mail 4", "orders 3"]);
}

#[test]
fn a_message_that_comes_later_wakes_the_work() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let mut working = Working::start(work(&place, "mail", "cat; echo"));
    assert_eq!(working.hear(), "a");
    working.hear_of("message 1 of \"mail\" acked after");
    enqueue(&place, ["b"]);
    assert_eq!(working.hear(), "b");
    working.hear_of("message 2 of \"mail\" acked after");
    working.signal("INT");
    assert_eq!(working.end(), 0);
}

#[test]
fn a_stop_interrupts_what_runs_and_costs_it_no_attempt() {
    for name in ["TERM", "INT", "HUP"] {
        let place = Place::new();
        enqueue(&place, ["a", "b", "c"]);
        let script = r#"trap 'echo told; exit 1' TERM; echo ready; sleep 1000 & wait"#;
        let mut working = Working::start(work(&place, "mail -j 2 --json", script));
        for _ in 0..2 {
            working.hear_of("ready");
        }
        working.signal(name);
        assert_eq!(working.end(), 0);
        let mut said: Vec<String> = working.err.iter().collect();
        said.retain(|line| line == "told");
        assert_eq!(said.len(), 2, "{name}");
        assert_eq!(working.out.iter().filter(|line| line.contains("\"outcome\":\"released\"")).count(), 2);
        for id in 1..=3 {
            is_back(&place, id);
        }
        assert_eq!(place.store().stats().unwrap().queues[0].count(Status::Pending), 3);
        assert!(place.store().workers().unwrap().is_empty());
    }
}

#[test]
fn whoever_does_not_end_when_told_is_killed_after_the_grace() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let script = "trap '' TERM; echo $$; sleep 1000";
    let mut working = Working::start(work(&place, "mail --grace 200ms", script));
    let pid = working.hear();
    working.signal("TERM");
    assert_eq!(working.end(), 0);
    is_back(&place, 1);
    is_gone(&pid);
}

/// No process of this group is left.
fn is_gone(group: &str) {
    let check = format!("kill -0 -{group} 2>/dev/null");
    until(|| (!Command::new("sh").args(["-c", &check]).status().unwrap().success()).then_some(()));
}

#[test]
fn a_command_that_still_finishes_is_taken_at_its_word() {
    let place = Place::new();
    enqueue(&place, ["exit 0", "exit 65", "exit 75"]);
    let script = r#"trap '. /dev/fd/3' TERM; exec 3<&0; echo ready; sleep 1000 & wait"#;
    let mut working = Working::start(work(&place, "mail -j 3", script));
    for _ in 0..3 {
        assert_eq!(working.hear(), "ready");
    }
    working.signal("TERM");
    assert_eq!(working.end(), 0);
    place.fails("show 1", 3);
    assert_eq!((&place.show(2)["status"], &place.show(3)["deferrals"]), (&json!("dead"), &json!(1)));
}

#[test]
fn a_second_signal_kills_at_once() {
    let place = Place::new();
    enqueue(&place, ["a", "b"]);
    let script = "trap '' TERM; echo $$; sleep 1000";
    let mut working = Working::start(work(&place, "mail -j 2 --grace 1h", script));
    let pids = [working.hear(), working.hear()];
    working.signal("TERM");
    working.hear_of("stopping");
    working.signal("INT");
    assert_eq!(working.end(), 130);
    is_back(&place, 1);
    is_back(&place, 2);
    pids.iter().for_each(|pid| is_gone(pid));
}

#[test]
fn a_command_that_takes_too_long_has_failed() {
    let place = Place::new();
    enqueue(
        &place,
        ["trap '' TERM; sleep 1000", "kill -STOP $$", "echo working >&2; trap 'exit 0' TERM; sleep 1000 & wait"],
    );
    drain(&place, "mail -j 3 --limit 300ms --grace 300ms", ". /dev/stdin");
    for (id, error) in [(1, ""), (2, ""), (3, "\nworking")] {
        assert_eq!(error_of(&place, id), format!("over its time limit of 300ms{error}"));
        assert_eq!((&place.show(id)["attempts"], &place.show(id)["crashes"]), (&json!(1), &json!(0)));
    }
}

#[test]
fn a_message_that_is_cancelled_ends_its_command() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let working = Working::start(work(&place, "mail --lease 1s", "echo $$; sleep 1000"));
    let pid = working.hear();
    place.ok("cancel 1");
    let line = working.hear_of("lost after");
    assert!(line.contains("message 1 was cancelled while it was held"), "{line}");
    is_gone(&pid);
}

#[test]
fn a_command_that_takes_longer_than_its_lease_keeps_its_message() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let script = r#"echo ready; until [ -e "$0/go" ]; do sleep 0.02; done"#;
    let working = Working::start(work(&place, "mail --lease 200ms", script));
    working.hear();
    // Three times as long as it takes until a claim that nobody extends is another's.
    let store = place.store();
    let other = store.worker("other").unwrap();
    for _ in 0..3 {
        store.queue("clock").enqueue("tick").unwrap();
        let silent = store.worker_unnamed().unwrap().lease(LEASE).unwrap();
        let _tick = silent.claim("clock").unwrap().unwrap();
        let taken = until(|| {
            assert!(other.claim("mail").unwrap().is_none());
            other.claim("clock").unwrap()
        });
        taken.ack().unwrap();
    }
    std::fs::write(place.path("go"), "").unwrap();
    working.hear_of("message 1 of \"mail\" acked");
}

/// A killed `relet work` leaves its command behind: as long as that is at work, the message is its.
#[test]
fn an_orphan_keeps_its_message() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let mut working = Working::start(work(&place, "mail -w w --lease 1h", "echo $$; exec sleep 1000"));
    let orphan = working.hear();
    working.process.0.kill().unwrap();
    working.process.0.wait().unwrap();
    let store = place.store();
    let other = store.worker("other").unwrap();
    assert!(other.claim("mail").unwrap().is_none());
    assert!(matches!(store.worker("w"), Err(Error::LabelTaken { .. })));
    signal(&orphan, "KILL");
    let claim = until(|| other.claim("mail").unwrap());
    assert_eq!((claim.id().get(), claim.crashes()), (1, 1));
}

#[test]
fn a_command_that_cannot_be_started_costs_nothing() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let file = place.path("file");
    std::fs::write(&file, "#!/nowhere/at-all\n").unwrap();
    let refused = |program: &str, why: &str| {
        let mut command = relet(["work", "mail", "--drain", "-d"]);
        command.arg(place.db()).args(["--", program]);
        let ran = run(command, b"");
        assert_eq!(ran.code, 1, "{program}: {}", ran.err);
        let said = ran.err.lines().last().unwrap_or_default();
        assert!(said.starts_with(&format!("relet: the command {program:?} cannot be started: ")), "{}", ran.err);
        assert!(said.contains(why), "{}", ran.err);
        is_back(&place, 1);
    };
    refused("no-such-command", "it is in no folder of PATH");
    refused("", "it is in no folder of PATH");
    refused("/no/such/command", "No such file");
    refused("./no-such-command", "No such file");
    refused("/", "no program that may be run");
    refused(file.to_str().unwrap(), "no program that may be run");
    assert_eq!(place.show(1)["releases"], 0);
    // This one is found out only when it is started.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    refused(file.to_str().unwrap(), "No such file");
    assert_eq!(place.show(1)["releases"], 1);
}

#[test]
fn a_wrong_command_line_is_refused() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    for (options, text) in [
        ("mail mail", "queue \"mail\" is named twice"),
        ("mail --weight orders=2", "queue \"orders\", which is not worked on"),
        ("mail --weight mail=1 --weight mail=2", "--weight names queue \"mail\" twice"),
        ("mail --weight mail", "write it as QUEUE=3"),
        ("mail --weight mail=0", "weight 0 is out of range"),
        ("mail -j 0", "0 is not in 1..=1024"),
        ("mail -j 1025", "1025 is not in 1..=1024"),
        ("mail --lease 0s", "lease"),
        ("mail --limit soon", "soon"),
        ("", "<QUEUE>"),
    ] {
        // What is not refused ends all the same.
        let ran = run(work(&place, &format!("{options} --drain"), "true"), b"");
        assert_eq!(ran.code, 2, "{options}: {}", ran.err);
        assert!(ran.err.contains(text), "{options}: {}", ran.err);
    }
    assert!(place.fails("work mail", 2).err.contains("COMMAND"));
    is_back(&place, 1);
    // No store is made for it.
    let none = Place::new();
    assert_eq!(run(work(&none, "mail", "true"), b"").code, 3);
    assert!(none.files().is_empty());
}

#[test]
fn a_queue_that_is_not_there_yet_is_named_once() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let ran = drain(&place, "mial mail orders", "true");
    for (queue, times) in [("mial", 1), ("mail", 0), ("orders", 1)] {
        assert_eq!(ran.err.matches(&format!("queue {queue:?} is a new one")).count(), times, "{queue}: {}", ran.err);
    }
}

#[test]
fn where_no_lock_can_be_made_the_way_out_is_named() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    std::fs::write(place.path("queue.db-relet-workers"), "").unwrap();
    let ran = run(work(&place, "mail", "true"), b"");
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("queue.db-relet-workers must be a folder that can be written"), "{}", ran.err);
    is_back(&place, 1);
}

#[test]
fn a_label_that_is_taken_is_refused() {
    let place = Place::new();
    enqueue(&place, ["a"]);
    let store = place.store();
    let _mine = store.worker("mine").unwrap();
    let ran = run(work(&place, "mail -w mine", "true"), b"");
    assert_eq!(ran.code, 4);
    assert!(ran.err.contains("label \"mine\" belongs to a running worker"), "{}", ran.err);
    assert!(
        ran.err.contains("started at 2") && ran.err.contains("Z) or to a command that it has started"),
        "{}",
        ran.err
    );
}

/// Each command counts the threads of relet, and its children that nobody has waited for.
#[test]
#[cfg(target_os = "linux")]
fn a_message_leaves_no_thread_and_no_zombie_behind() {
    let place = Place::new();
    enqueue(&place, (0..40).map(|number| number.to_string()));
    let script = r#"[ -d /proc/$PPID/task ] || exit 0
        set -- /proc/$PPID/task/*; echo $#
        for status in /proc/[0-9]*/status; do
            if grep -q "^PPid:.$PPID\$" "$status" && grep -q "^State:.Z" "$status"; then echo zombie; fi
        done 2>/dev/null; exit 0"#;
    let ran = drain(&place, "mail", script);
    let threads: Vec<u32> = ran.text().lines().map(|line| line.parse().expect("no zombie")).collect();
    assert!(threads.iter().all(|count| *count < 20), "{threads:?}");
    assert_eq!(place.store().stats().unwrap().queues[0].acked, 40);
}
