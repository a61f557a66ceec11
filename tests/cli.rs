//! The command line keeps its promises: every command, every exit code, and what is said on which stream.
#![cfg(feature = "cli")]

mod command;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use command::{PATIENCE, Place, closed_pipe, end, lines_of, relet, run};
use relet::rusqlite::Connection;
use relet::{Status, Store};
use serde_json::Value;

#[test]
fn a_message_goes_round_by_its_receipt() {
    let place = Place::new();
    assert_eq!(place.ok("enqueue mail hello").line(), "1");
    let claim = place.ok("claim mail --worker w");
    assert_eq!(claim.out, b"1.1\nhello\n");
    assert!(claim.err.contains("message 1"));
    assert_eq!(place.ok("ack 1.1").line(), "1.1: acked, the message is done");
    place.fails("show 1", 3);
    assert_eq!(place.store().stats().unwrap().queues[0].acked, 1);
}

#[test]
fn settling_twice_is_safe_and_says_so() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b");
    place.ok("claim mail -w w -n 2");
    place.ok("ack 1.1");
    assert!(place.fails("ack 1.1", 3).err.contains("settled before"));
    place.ok("reject 2.1 --error no");
    let again = place.ok("reject 2.1 --error no --json").json().remove(0);
    assert_eq!((&again["outcome"], &again["status"]), (&"settled_before".into(), &"dead".into()));
}

#[test]
fn an_older_receipt_settles_nothing() {
    let place = Place::new();
    place.ok("enqueue mail hello");
    place.ok("claim mail -w w");
    assert_eq!(place.ok("claim --id 1 -w w").text(), "1.2\nhello\n");
    for verb in ["ack", "fail --error e", "reject --error e", "defer --for 1s", "release", "extend --lease 1h"] {
        let ran = place.fails(&format!("{verb} 1.1"), 4);
        assert!(ran.err.contains("1.1 is stale") && ran.err.contains("\"w\"") && ran.text().is_empty(), "{verb}");
    }
    let message = place.show(1);
    assert_eq!((&message["receipt"], &message["attempts"]), (&"1.2".into(), &2.into()));
    place.ok("ack 1.2");
}

#[test]
fn each_way_to_settle_leads_where_it_says() {
    let place = Place::new();
    for _ in 1..=5 {
        place.ok("enqueue mail x");
    }
    place.ok("claim mail -w w -n 5");
    let text = place.ok("fail 1.1 --error boom --retry-in 1h").text().to_owned();
    assert_eq!(text, "1.1: failed, the message is pending\n");
    let failed = place.show(1);
    assert_eq!(
        (&failed["status"], &failed["last_error"], &failed["attempts"]),
        (&"pending".into(), &"boom".into(), &1.into())
    );
    assert!(failed["due_at"].as_i64().unwrap() > failed["enqueued_at"].as_i64().unwrap() + 3_500_000);

    place.ok("reject 2.1 --error junk");
    assert_eq!((&place.show(2)["status"], &place.show(2)["last_error"]), (&"dead".into(), &"junk".into()));

    place.ok("defer 3.1 --for 1h --reason 429");
    let deferred = place.show(3);
    assert_eq!(
        (&deferred["status"], &deferred["worker"], &deferred["deferrals"]),
        (&"processing".into(), &"w".into(), &1.into())
    );
    assert_eq!(
        (&deferred["receipt"], &deferred["lease_left_ms"], &deferred["attempts"]),
        (&Value::Null, &Value::Null, &0.into())
    );

    place.ok("release 4.1");
    assert_eq!((&place.show(4)["status"], &place.show(4)["attempts"]), (&"pending".into(), &0.into()));

    place.ok("extend 5.1 --lease 2h");
    let left = place.show(5)["lease_left_ms"].as_i64().unwrap();
    assert!((3_600_000..=7_200_000).contains(&left));

    let waiting = place.ok("retry-queue mail --json").json();
    let rows: Vec<_> =
        waiting.iter().map(|row| (row["id"].as_i64(), row["reason"].as_str(), row["worker"].as_str())).collect();
    assert_eq!(rows, [(Some(1), Some("boom"), None), (Some(3), Some("429"), Some("w"))]);
    assert!(place.ok("retry-queue").text().contains("429"));
    assert_eq!(place.ok("retry-queue --limit 1 --json").json().len(), 1);
}

#[test]
fn of_several_receipts_each_has_its_outcome_and_the_worst_is_the_exit_code() {
    let place = Place::new();
    for _ in 1..=3 {
        place.ok("enqueue mail x");
    }
    place.ok("claim mail -w w -n 3");
    place.ok("claim --id 3 -w w");
    let ran = place.run("ack 1.1 2.1 3.1 77.1 --json".split(' '));
    assert_eq!(ran.code, 4);
    let rows: Vec<_> = ran.json().iter().map(|row| format!("{} {}", row["receipt"], row["outcome"])).collect();
    assert_eq!(rows, ["\"1.1\" \"acked\"", "\"2.1\" \"acked\"", "\"3.1\" \"stale\"", "\"77.1\" \"gone\""]);
    assert_eq!(place.fails("ack 1.1 2.1", 3).text(), "");
    assert_eq!(place.show(3)["receipt"], "3.2");
}

#[test]
fn a_deferred_message_comes_back_to_its_worker() {
    let place = Place::new();
    place.ok("enqueue mail hello");
    place.ok("claim mail -w mailer-1");
    place.ok("defer 1.1 --for 0s --reason 429");
    let again = place.ok("claim mail -w mailer-1");
    assert_eq!(again.text(), "1.2\nhello\n");
    assert!(again.err.contains("resumed"), "{}", again.err);
    place.ok("ack 1.2");
}

#[test]
fn a_claim_by_id_says_in_words_what_stands_in_its_way() {
    let place = Place::new();
    place.ok("enqueue mail held");
    place.ok("enqueue mail later --delay 1h");
    place.ok("enqueue mail g1 --group g");
    place.ok("enqueue mail g2 --group g");
    place.ok("enqueue mail over");
    place.ok("cancel 5");
    place.ok("claim --id 1 --worker w --lease 1h");
    for (id, code, word) in [
        (1, 4, "held by worker \"w\""),
        (2, 4, "waiting until"),
        (4, 4, "waiting behind message 3"),
        (5, 3, "cancelled"),
        (99, 3, "not in the store"),
    ] {
        let ran = place.fails(&format!("claim --id {id} --worker other"), code);
        assert!(ran.err.contains(word), "{id}: {}", ran.err);
        assert_eq!(ran.text(), "");
    }
    assert_eq!(place.ok("claim --id 1 -w w --json").json()[0]["receipt"], "1.2");
}

#[test]
fn a_claim_that_waits_gets_what_comes() {
    let place = Place::new();
    place.ok("enqueue other x");
    let mut child = place.command(["claim", "mail", "-w", "w", "--wait", "60s"]).spawn().unwrap();
    let lines = lines_of(child.stdout.take().unwrap());
    place.ok("enqueue mail hello");
    assert_eq!(lines.recv_timeout(PATIENCE).unwrap(), "2.1");
    assert_eq!(end(child), 0);
    let ran = place.fails("claim mail -w w --wait 60ms", 3);
    assert!(ran.err.contains("nothing to claim in queue \"mail\" within 60ms"), "{}", ran.err);
}

#[test]
fn of_many_claims_each_takes_one_line() {
    let place = Place::new();
    place.run(["enqueue", "mail", "two\nlines"]);
    place.ok("enqueue mail b --priority 5");
    assert_eq!(place.ok("claim mail -w w -n 9").text(), "2.1\tb\n1.1\ttwo\\nlines\n");
}

#[test]
fn a_message_in_json_has_the_promised_members() {
    let place = Place::new();
    place.run(["enqueue", "mail", "{\"order\": 42}", "--priority", "-3", "--key", "k", "--group", "g", "--ttl", "1d"]);
    place.ok("claim mail -w w");
    let shown = place.show(1);
    for member in [
        "id",
        "queue",
        "status",
        "priority",
        "attempts",
        "crashes",
        "deferrals",
        "due_at",
        "worker",
        "receipt",
        "lease_left_ms",
        "payload",
        "last_error",
        "enqueued_at",
    ] {
        assert!(shown.get(member).is_some(), "{member}");
    }
    assert_eq!(shown["payload"]["order"], 42);
    assert_eq!((&shown["priority"], &shown["receipt"], &shown["worker"]), (&(-3).into(), &"1.1".into(), &"w".into()));
    assert!(shown["enqueued_at"].as_i64().unwrap() > 1_600_000_000_000 && shown["due_at"].is_null());
    let claimed = place.ok("claim --id 1 -w w --json").json().remove(0);
    assert_eq!(
        claimed.as_object().unwrap().keys().collect::<Vec<_>>(),
        shown.as_object().unwrap().keys().collect::<Vec<_>>()
    );
    let listed = place.ok("list mail --json --payload").json().remove(0);
    assert_eq!(listed["payload"], shown["payload"]);
    let sized = place.ok("list mail --json").json().remove(0);
    assert!(sized.get("payload").is_none() && sized["payload_bytes"] == 13);
}

#[test]
fn every_byte_of_a_payload_comes_back() {
    let place = Place::new();
    let bytes: Vec<u8> = (0..=255).collect();
    assert_eq!(place.run_with(["enqueue", "mail", "-"], &bytes).line(), "1");
    assert_eq!(place.ok("claim mail -w w").out, [b"1.1\n".as_slice(), &bytes, b"\n"].concat());
    let shown = place.show(1);
    assert!(shown.get("payload").is_none());
    assert!(shown["payload_base64"].as_str().unwrap().starts_with("AAECAwQF"));
    place.run_with(["enqueue", "mail", "-"], b"");
    assert_eq!(place.show(2)["payload"], "");
    for (payload, json) in [("[1, 2]", "[1,2]"), ("null", "null"), ("say", "\"say\""), ("\"quoted\"", "\"quoted\"")] {
        let id = place.run(["enqueue", "mail", payload]).line().parse().unwrap();
        assert_eq!(place.show(id)["payload"].to_string(), json);
    }
}

#[cfg(unix)]
#[test]
fn arguments_need_not_be_unicode() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let odd = OsStr::from_bytes(b"\xff\xfe");
    assert_eq!(place.run([OsStr::new("enqueue"), OsStr::new("mail"), odd]).code, 0);
    assert_eq!(place.show(1)["payload_base64"], "//4=");
    for args in [["enqueue".as_ref(), odd, "x".as_ref()], ["list".as_ref(), "--after".as_ref(), odd]] {
        assert_eq!(place.run(args).code, 2);
    }
    let mut elsewhere = relet(["enqueue", "mail", "x", "-d"]);
    elsewhere.arg(place.folder.join(odd));
    assert_eq!(run(elsewhere, b"").code, 0);
}

#[test]
fn the_store_is_named_by_d_or_by_the_environment() {
    let place = Place::new();
    for name in [None, Some("")] {
        let mut command = relet(["stats"]);
        if let Some(name) = name {
            command.env("RELET_DB", name);
        }
        let ran = run(command, b"");
        assert_eq!(ran.code, 2);
        assert!(ran.err.contains("-d FILE") && ran.err.contains("RELET_DB"), "{}", ran.err);
    }
    let mut command = relet(["enqueue", "mail", "x"]);
    command.env("RELET_DB", place.db());
    assert_eq!(run(command, b"").code, 0);
    assert_eq!(place.ok("list").text().lines().count(), 2);
    let mut command = relet(["enqueue", "mail", "x", "--db"]);
    command.arg(place.path("other.db")).env("RELET_DB", place.db());
    assert_eq!(run(command, b"").line(), "1");
    assert!(place.path("other.db").exists());
}

#[test]
fn only_what_brings_something_makes_a_store() {
    let place = Place::new();
    for line in [
        "stats",
        "list",
        "show 1",
        "why 1",
        "retry-queue",
        "stuck",
        "dead list",
        "doctor",
        "export",
        "backup copy",
        "claim mail -w w",
        "claim --id 1 -w w",
        "ack 1.1",
        "fail 1.1 --error e",
        "reject 1.1 --error e",
        "defer 1.1 --for 1s",
        "release 1.1",
        "extend 1.1 --lease 1s",
        "route 1 queued",
        "cancel 1",
        "dead redrive 1",
        "dead redrive --all",
        "dead purge",
        "prune",
    ] {
        let ran = place.fails(line, 3);
        assert!(ran.err.contains("there is no store at"), "{line}: {}", ran.err);
        assert_eq!(place.files(), Vec::<OsString>::new(), "{line}");
    }
    assert_eq!(place.run_with(["import"], b"").code, 0);
    assert!(place.db().exists());
    let ran = run(relet(["enqueue", "q", "x", "-d", "/no/such/folder/a.db"]), b"");
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("/no/such/folder/a.db"), "{}", ran.err);
}

#[test]
fn a_database_of_something_else_is_left_alone() {
    let place = Place::new();
    Connection::open(place.db()).unwrap().execute_batch("CREATE TABLE app (id INTEGER); VACUUM").unwrap();
    let before = std::fs::read(place.db()).unwrap();
    for line in ["stats", "ack 1.1", "claim mail -w w", "prune", "cancel 1"] {
        assert!(place.fails(line, 1).err.contains("no relet store yet"), "{line}");
    }
    assert_eq!(std::fs::read(place.db()).unwrap(), before);
    std::fs::write(place.path("empty"), "").unwrap();
    let ran = run(relet(["stats".as_ref(), "-d".as_ref(), place.path("empty").as_os_str()]), b"");
    assert!(ran.code == 1 && ran.err.contains("`relet enqueue` does that"), "{}", ran.err);
    assert_eq!(run(relet(["stats", "-d", "."]), b"").code, 1);
    std::fs::write(place.path("text"), "this is no database, however long one looks at it. ".repeat(100)).unwrap();
    let mut command = relet(["list", "-d"]);
    command.arg(place.path("text"));
    assert_eq!(run(command, b"").code, 1);
}

#[test]
fn a_store_of_a_newer_relet_is_refused_unchanged() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch(
        "UPDATE relet_meta SET value = value + 1 WHERE key = 'schema_version'; PRAGMA wal_checkpoint(TRUNCATE)",
    )
    .unwrap();
    drop(conn);
    let before = std::fs::read(place.db()).unwrap();
    for line in ["stats", "list", "enqueue mail y", "claim mail -w w", "ack 1.1", "doctor", "export"] {
        assert!(place.fails(line, 1).err.contains("schema too new: found version"), "{line}");
    }
    assert_eq!(std::fs::read(place.db()).unwrap(), before);
}

#[test]
fn what_the_command_line_cannot_mean_is_a_usage_error() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let long = "x".repeat(600);
    for line in [
        "frobnicate",
        "claim",
        "claim mail",
        "claim mail --id 1 -w w",
        "claim --id 1 -w w --wait 1s",
        "claim mail -w w -n 0",
        "claim mail -w w -n 99999999999",
        "claim mail -w w --lease 0s",
        "ack",
        "ack 1",
        "ack 1.2.3",
        "ack -1.1",
        "ack 99999999999999999999.1",
        "show 0",
        "show -1",
        "show x",
        "show 9223372036854775808",
        "route 1 processing",
        "list --status Pending",
        "enqueue mail",
        "enqueue mail x --priority 99999",
        "enqueue mail x --priority 99999999999",
        "enqueue mail x --max-attempts 0",
        "enqueue mail x --delay 1s --at 2030-01-01T00:00:00Z",
        "enqueue mail x --lines",
        "enqueue mail --lines=yaml",
        "enqueue mail --lines --key k",
        "dead redrive",
        "dead redrive 1 --all",
        "fail 1.1",
        "defer 1.1",
        "extend 1.1 --lease 9999d",
        "stats --durability half",
        "completions cobol",
        "demo --workers 0",
        &format!("enqueue {long} x"),
        &format!("claim mail -w {long}"),
        &format!("enqueue mail x --key {long}"),
    ] {
        place.fails(line, 2);
    }
    assert_eq!(place.run(["enqueue", "", "x"]).code, 2);
    assert_eq!(run(relet::<&str>([]), b"").code, 2);
    assert_eq!(place.ok("list --json").json().len(), 1);
}

#[test]
fn durations_and_instants_that_cannot_be_are_named_with_the_right_form() {
    let place = Place::new();
    for (option, value) in [
        ("--delay", "5"),
        ("--delay", "-5s"),
        ("--delay", "1.5h"),
        ("--delay", "soon"),
        ("--delay", ""),
        ("--delay", "99999999999999999999999d"),
        ("--ttl", "1m1h"),
        ("--busy-wait", "x"),
    ] {
        let ran = place.run(["enqueue", "mail", "x", option, value]);
        assert_eq!(ran.code, 2, "{value}");
        assert!(ran.err.contains(&format!("{value:?}")) && ran.err.contains("30s, 5m, 1h30m"), "{value}: {}", ran.err);
    }
    for value in ["tomorrow", "2030-01-31", "2030-01-31T08:00:00", "9999999999"] {
        let ran = place.run(["enqueue", "mail", "x", "--at", value]);
        assert_eq!(ran.code, 2, "{value}");
        assert!(ran.err.contains(value) && ran.err.contains("2030-01-31T08:00:00Z"), "{}", ran.err);
    }
    assert!(!place.db().exists());
    place.ok("enqueue mail x --at 2100-01-31T09:00:00+01:00");
    assert_eq!(place.show(1)["due_at"], 4_105_065_600_000_i64);
    assert!(place.ok("show 1").text().contains("2100-01-31T08:00:00Z"));
    place.ok("enqueue mail x --at 1900-01-01T00:00:00Z");
    assert!(place.show(2)["due_at"].is_null());
    place.ok("enqueue mail x --delay 36525d --ttl 36525d");
}

#[test]
fn huge_numbers_are_no_panic() {
    let place = Place::new();
    place.ok("enqueue mail x");
    place.ok("list --limit 18446744073709551615 --after 9223372036854775807");
    assert_eq!(place.ok("list --limit 18446744073709551615 --json").json().len(), 1);
    place.ok("retry-queue --limit 18446744073709551615");
    place.ok("stuck --older-than 36525d");
    place.ok("dead purge --older-than 36525d");
    place.fails("ack 9223372036854775807.9223372036854775807-9223372036854775807", 3);
    place.fails("show 9223372036854775807", 3);
    place.ok("enqueue mail x --busy-wait 1d --retention 36525d --max-attempts 2147483647");
    place.fails("stats --busy-wait 36525d", 2);
}

#[test]
fn a_key_that_is_live_stores_nothing_and_says_so() {
    let place = Place::new();
    place.ok("enqueue mail a --key k");
    let again = place.ok("enqueue mail b --key k");
    assert_eq!(again.line(), "1");
    assert!(again.err.contains("nothing was stored"));
    assert_eq!(place.ok("enqueue mail b --key k --json").json()[0]["existing"], true);
}

#[test]
fn each_line_of_stdin_is_a_message_and_a_bad_one_is_named() {
    let place = Place::new();
    let ran = place.run_with(
        ["enqueue", "mail", "--lines", "--json", "--priority", "7"],
        b"{\"a\":1}\n{bad\n\n{\"b\": 2}\r\n{\"c\":3}",
    );
    assert_eq!(ran.code, 1);
    let stored: Vec<_> =
        ran.json().iter().map(|row| (row["line"].as_i64().unwrap(), row["id"].as_i64().unwrap())).collect();
    assert_eq!(stored, [(1, 1), (4, 2), (5, 3)]);
    assert!(
        ran.err.contains("line 2: no JSON") && ran.err.contains("3 messages stored, 1 line refused"),
        "{}",
        ran.err
    );
    let shown = place.show(2);
    assert_eq!(
        (&shown["payload"]["b"], &shown["priority"], &shown["payload_bytes"]),
        (&2.into(), &7.into(), &8.into())
    );

    let plain = place.run_with(["enqueue", "mail", "-", "--lines"], b"plain\n{bad\n\xff\n");
    assert_eq!((plain.code, plain.text()), (0, ""));
    assert_eq!((&place.show(5)["payload"], &place.show(6)["payload_base64"]), (&"{bad".into(), &"/w==".into()));
    assert_eq!(place.run_with(["enqueue", "mail", "--lines=text"], b"{bad\n").code, 0);
    let json = place.run_with(["enqueue", "mail", "--lines=json"], b"1\nno\n\xff\n \n[]\n");
    assert_eq!(json.code, 1);
    assert!(
        json.err.contains("line 2: ")
            && json.err.contains("line 3: ")
            && json.err.contains("2 messages stored, 2 lines")
    );
    assert_eq!(place.run_with(["enqueue", "mail", "--lines"], b"").code, 0);
}

#[test]
fn a_line_is_stored_while_stdin_stays_open() {
    let place = Place::new();
    let mut child = place.command(["enqueue", "mail", "--lines", "--json"]).stdin(Stdio::piped()).spawn().unwrap();
    let lines = lines_of(child.stdout.take().unwrap());
    for number in 1..=3_i64 {
        // The second line is written only after the first has come back: nothing waits for the end of the input.
        child.stdin.as_mut().unwrap().write_all(format!("line {number}\nhalf").as_bytes()).unwrap();
        let row: Value = serde_json::from_str(&lines.recv_timeout(PATIENCE).unwrap()).unwrap();
        assert_eq!(row["id"], number);
        let message = place.store().show(number).unwrap().expect("it was committed before it was printed");
        let expected = if number == 1 { "line 1".into() } else { format!("halfline {number}") };
        assert_eq!(message.payload, Some(expected.into_bytes()));
    }
    assert_eq!(end(child), 0);
    assert_eq!(place.show(4)["payload"], "half");
}

#[test]
fn a_long_input_is_stored_whole_and_in_order() {
    let place = Place::new();
    let input: String = (0..20_000).map(|number| format!("{number}\n")).collect();
    let ran = place.run_with(["enqueue", "mail", "--lines"], input.as_bytes());
    assert_eq!(ran.code, 0);
    assert!(ran.err.contains("20000 messages stored"));
    let payloads = place.ok("list --json --payload --limit 20000").json();
    assert!(
        payloads.iter().enumerate().all(|(number, message)| message["payload"] == number) && payloads.len() == 20_000
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_line_without_an_end_takes_bounded_memory() {
    let place = Place::new();
    let mut child = place.command(["enqueue", "mail", "--lines"]).stdin(Stdio::piped()).spawn().unwrap();
    let lines = lines_of(child.stderr.take().unwrap());
    let mut stdin = child.stdin.take().unwrap();
    let chunk = vec![b'x'; 1 << 20];
    for _ in 0..200 {
        stdin.write_all(&chunk).unwrap();
    }
    stdin.write_all(b"\nshort\n").unwrap();
    let named = lines.recv_timeout(PATIENCE).unwrap();
    assert!(named.contains("line 1: 209715200 bytes are too long"), "{named}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let kib: u64 = peak.trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 100 * 1024, "{kib} KiB for a limit of 16 MiB");
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(place.show(1)["payload"], "short");
}

#[test]
fn a_payload_over_the_limit_is_refused() {
    let place = Place::new();
    let big = vec![b'x'; relet::PAYLOAD_MAX + 1];
    let ran = place.run_with(["enqueue", "mail", "-"], &big);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("payload too large"));
    assert_eq!(place.run_with(["enqueue", "mail", "-"], &big[1..]).code, 0);
}

#[test]
fn a_closed_pipe_is_silent() {
    let place = Place::new();
    place.ok("enqueue mail x --durability normal");
    for line in [
        "list --json --payload",
        "list",
        "show 1",
        "why 1",
        "stats",
        "export",
        "man",
        "completions bash",
        "--help",
        "enqueue mail x",
        "doctor",
        "--version",
    ] {
        let mut command = place.command(line.split(' '));
        command.stdout(closed_pipe());
        let ran = run(command, b"");
        assert_eq!(ran.code, 0, "{line}");
        let talk = ["live message", "nothing is wrong"];
        assert!(ran.err.is_empty() || talk.iter().any(|talk| ran.err.contains(talk)), "{line}: {}", ran.err);
    }
    let mut command = place.command(["show", "99"]);
    command.stderr(closed_pipe());
    assert_eq!(run(command, b"").code, 3);
}

#[test]
fn lines_are_stored_although_nobody_reads_their_ids() {
    let place = Place::new();
    let mut command = place.command(["enqueue", "mail", "--lines", "--json"]);
    command.stdout(closed_pipe());
    assert_eq!(run(command, b"a\nb\nc\n").code, 0);
    assert_eq!(place.ok("list --json").json().len(), 3);
}

#[test]
fn a_claim_that_cannot_be_printed_is_given_back() {
    let place = Place::new();
    place.ok("enqueue mail x");
    for args in [
        ["claim", "mail", "-w", "w"].as_slice(),
        &["claim", "mail", "-w", "w", "--json"],
        &["claim", "--id", "1", "-w", "w"],
    ] {
        let mut command = place.command(args);
        command.stdout(closed_pipe());
        assert_eq!(run(command, b"").code, 0);
        let message = place.show(1);
        assert_eq!((&message["status"], &message["attempts"]), (&"pending".into(), &0.into()));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let place = Place::new();
    place.ok("enqueue mail x");
    for (line, stdin) in [
        ("list", b"".as_slice()),
        ("export", b""),
        ("claim mail -w w", b""),
        ("enqueue mail --lines --json", b"y\nz\n"),
    ] {
        let mut command = place.command(line.split(' '));
        command.stdout(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
        let ran = run(command, stdin);
        assert_eq!(ran.code, 1, "{line}");
        assert!(ran.err.contains("the output cannot be written"), "{line}: {}", ran.err);
    }
    assert_eq!(place.ok("list --status pending --json").json().len(), 3);
}

#[test]
fn lists_are_filtered_and_paged() {
    let place = Place::new();
    for payload in ["a", "b", "c", "d"] {
        place.ok(&format!("enqueue mail {payload}"));
    }
    place.ok("enqueue post e");
    place.ok("claim mail -w w");
    let ids = |line: &str| -> Vec<i64> {
        place.ok(&format!("{line} --json")).json().iter().map(|row| row["id"].as_i64().unwrap()).collect()
    };
    assert_eq!(ids("list"), [1, 2, 3, 4, 5]);
    assert_eq!(ids("list mail --status pending --limit 2"), [2, 3]);
    assert_eq!(ids("list mail --after 3"), [4]);
    assert_eq!(ids("list --status processing"), [1]);
    assert_eq!(ids("list --limit 0"), Vec::<i64>::new());
    assert!(place.ok("list --status done").err.contains("no messages"));
    assert!(place.fails("list nosuch", 3).err.contains("no queue \"nosuch\""));
    let table = place.ok("list mail --payload").text().to_owned();
    assert!(table.starts_with("ID") && table.lines().count() == 5 && table.contains("processing"), "{table}");
}

#[test]
fn a_message_cannot_talk_to_the_terminal() {
    let place = Place::new();
    place.run(["enqueue", "mail", "\u{1b}[2Jboo\nID"]);
    for line in ["list --payload", "show 1", "claim mail -w w -n 2"] {
        let text = place.ok(line).text().to_owned();
        assert!(!text.contains('\u{1b}') && text.contains("\\u{1b}[2Jboo\\nID"), "{text}");
    }
}

#[test]
fn why_names_what_a_message_waits_for() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b --delay 1h");
    place.ok("enqueue mail c --group g");
    place.ok("enqueue mail d --group g");
    for (id, word, text) in
        [(1, "ready", "ready"), (2, "due", "waiting until"), (4, "behind", "behind message 3 of group \"g\"")]
    {
        assert!(place.ok(&format!("why {id}")).line().contains(text));
        assert_eq!(place.ok(&format!("why {id} --json")).json()[0]["why"], word);
    }
    place.ok("claim --id 1 -w w");
    let held = place.ok("why 1 --json").json().remove(0);
    assert_eq!((&held["why"], &held["worker"]), (&"held".into(), &"w".into()));
    place.ok("defer 1.1 --for 1h --reason 429");
    let deferred = place.ok("why 1 --json").json().remove(0);
    assert_eq!((&deferred["why"], &deferred["reason"]), (&"deferred".into(), &"429".into()));
    place.ok("cancel 1");
    assert_eq!(place.ok("why 1 --json").json()[0]["status"], "cancelled");
    place.fails("why 99", 3);
}

#[test]
fn stats_count_each_queue_and_the_store() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b");
    place.ok("enqueue post c --delay 1h");
    place.ok("claim mail -w w");
    let rows = place.ok("stats --json").json();
    assert_eq!(
        (&rows[0]["queue"], &rows[0]["pending"], &rows[0]["processing"], &rows[0]["live"]),
        (&"mail".into(), &1.into(), &1.into(), &2.into())
    );
    assert!(rows[0]["oldest_waiting_ms"].is_i64() && rows[1]["oldest_waiting_ms"].is_null());
    assert!(rows[2]["file_bytes"].as_i64().unwrap() > 0 && rows.len() == 3);
    let text = place.ok("stats").text().to_owned();
    assert!(text.starts_with("QUEUE") && text.contains("post") && text.contains("file "), "{text}");
}

#[test]
fn a_route_is_changed_and_kept() {
    let place = Place::new();
    place.ok("enqueue mail x");
    assert_eq!(place.ok("route 1 pending_local").line(), "1: routed to pending_local");
    assert_eq!(place.show(1)["status"], "pending_local");
    place.ok("claim mail -w w");
    place.ok("route 1 queued");
    place.ok("release 1.1");
    assert_eq!(place.show(1)["status"], "queued");
    place.fails("route 99 queued", 3);
    place.ok("cancel 1");
    place.fails("route 1 queued", 1);
}

#[test]
fn a_cancelled_message_is_told_to_its_holder() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b");
    place.ok("claim mail -w w");
    assert_eq!(place.ok("cancel 1").line(), "1: cancelled");
    let ran = place.fails("ack 1.1", 4);
    assert!(ran.err.contains("was cancelled"), "{}", ran.err);
    let ran = place.run("cancel 2 99 --json".split(' '));
    assert_eq!(ran.code, 3);
    assert_eq!(
        ran.json().iter().map(|row| row["outcome"].as_str().unwrap()).collect::<Vec<_>>(),
        ["cancelled", "gone"]
    );
    // Cancelling twice is safe; what is done cannot be cancelled.
    assert_eq!(place.ok("cancel 1").line(), "1: cancelled");
    place.ok("enqueue mail c");
    place.ok("claim --id 3 -w w");
    place.ok("ack 3.1 --retention 1h");
    place.fails("cancel 3", 1);
}

#[test]
fn dead_letters_are_listed_redriven_and_purged() {
    let place = Place::new();
    for key in ["a", "b", "c"] {
        place.ok(&format!("enqueue mail x --key {key}"));
    }
    place.ok("enqueue post x");
    place.ok("claim mail -w w -n 3");
    place.ok("claim post -w w");
    place.ok("reject 1.1 2.1 3.1 4.1 --error bad-address");
    let dead = place.ok("dead list --json").json();
    assert_eq!(dead.len(), 4);
    assert_eq!((&dead[0]["dead_reason"], &dead[0]["last_error"]), (&"rejected".into(), &"bad-address".into()));
    assert!(place.ok("dead list mail --limit 2").text().contains("bad-address"));
    place.fails("dead list nosuch", 3);

    assert_eq!(place.ok("dead redrive 1").line(), "1: redriven");
    let message = place.show(1);
    assert_eq!(
        (&message["status"], &message["attempts"], &message["redrives"]),
        (&"pending".into(), &0.into(), &1.into())
    );
    place.fails("dead redrive 99", 3);
    place.fails("dead redrive 1", 1);
    place.ok("enqueue mail y --key b");
    let ran = place.fails("dead redrive --queue mail", 1);
    assert!(ran.err.contains("live message 5 has the key \"b\""), "{}", ran.err);
    assert_eq!(ran.line(), "1 dead letter redriven");
    assert_eq!(place.ok("dead redrive --queue post --json").json()[0]["outcome"], "redriven");
    place.fails("dead redrive --queue nosuch", 3);

    assert_eq!(place.ok("dead purge --older-than 1h").line(), "0 dead letters deleted");
    assert_eq!(place.ok("dead purge --json").json()[0]["purged"], 1);
    assert_eq!(place.ok("dead redrive --all").line(), "0 dead letters redriven");
}

#[test]
fn a_stuck_message_is_found_and_looking_changes_nothing() {
    let place = Place::new();
    place.ok("enqueue mail x");
    place.ok("enqueue mail y");
    place.ok("claim mail -w w --lease 1h");
    assert!(place.ok("stuck --older-than 0s").err.contains("nothing is stuck"));
    place.ok("claim mail -w lazy --lease 1ms");
    // Whether the lease is over is what is asked; each look costs more time than it had.
    let found =
        (0..1_000).map(|_| place.run(["stuck", "--older-than", "0s", "--json"])).find(|ran| ran.code == 5).unwrap();
    assert_eq!(found.json().len(), 1);
    assert_eq!((&found.json()[0]["id"], &found.json()[0]["worker"]), (&2.into(), &"lazy".into()));
    assert!(place.fails("stuck --older-than 0s", 5).text().contains("lazy"));
    place.ok("stuck");
    assert_eq!(place.show(2)["receipt"], "2.1");
}

#[test]
fn the_doctor_finds_what_is_wrong() {
    let place = Place::new();
    place.ok("enqueue mail x");
    assert!(place.ok("doctor").err.contains("nothing is wrong"));
    Connection::open(place.db())
        .unwrap()
        .execute_batch("UPDATE relet_counters SET pending = 7 WHERE queue = 1")
        .unwrap();
    assert!(place.fails("doctor", 5).text().contains("counters differ"));
    assert!(place.fails("doctor --json", 5).json()[0]["finding"].as_str().unwrap().contains("mail"));
    let text = place.path("text");
    std::fs::write(&text, "this is no database, however long one looks at it. ".repeat(100)).unwrap();
    // What is no database is no patient.
    assert_eq!(run(relet(["doctor".as_ref(), "-d".as_ref(), text.as_os_str()]), b"").code, 1);
}

#[test]
fn what_passes_by_itself_needs_no_backup() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch("UPDATE relet_messages SET enqueued_at = enqueued_at + 172800000").unwrap();
    let ran = place.fails("doctor", 5);
    assert!(ran.text().contains("by a clock that was ahead"), "{}", ran.text());
    assert!(ran.err.contains("1 finding; nothing needs to be done"), "{}", ran.err);
    conn.execute_batch("UPDATE relet_counters SET pending = 7 WHERE queue = 1").unwrap();
    let ran = place.fails("doctor", 5);
    assert!(ran.err.contains("2 findings; ") && ran.err.contains("restore a backup"), "{}", ran.err);
}

#[test]
fn a_store_that_another_keeps_locked_is_busy() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch("BEGIN IMMEDIATE").unwrap();
    for line in ["enqueue mail y", "claim mail -w w", "ack 1.1"] {
        let ran = place.fails(&format!("{line} --busy-wait 20ms"), 75);
        let (_, waited) = ran.err.split_once("busy: another process held its write lock for ").expect(&ran.err);
        let (waited, _) = waited.split_once("ms;").expect(&ran.err);
        assert!(waited.parse::<u32>().is_ok_and(|ms| ms >= 20), "whole ms: {}", ran.err);
    }
    assert_eq!(place.run_with(["enqueue", "mail", "--lines", "--busy-wait", "20ms"], b"y\n").code, 75);
    place.ok("list");
    conn.execute_batch("ROLLBACK").unwrap();
    place.ok("enqueue mail y");
}

#[test]
fn a_backup_is_whole_and_replaces_nothing() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let copy = place.path("copy.db");
    let backup = |place: &Place| place.run(["backup".as_ref(), copy.as_os_str()]);
    assert_eq!(backup(&place).line(), copy.to_str().unwrap());
    let before = std::fs::read(&copy).unwrap();
    let again = backup(&place);
    assert_eq!(again.code, 1);
    assert!(again.err.contains("exists already"), "{}", again.err);
    assert_eq!(std::fs::read(&copy).unwrap(), before);
    let store = Store::open(&copy).unwrap();
    assert_eq!(store.show(1).unwrap().unwrap().payload, Some(b"x".into()));
    assert_eq!(place.run([OsStr::new("backup"), Path::new("/no/such/folder/copy").as_os_str()]).code, 1);
}

#[test]
fn receipts_of_a_copy_carry_its_epoch() {
    let place = Place::new();
    place.ok("enqueue mail x");
    let copy = place.path("copy.db");
    place.run(["backup".as_ref(), copy.as_os_str()]);
    place.ok("claim mail -w w");
    let on_copy = |line: &str| {
        let mut command = relet(line.split(' '));
        command.arg("-d").arg(&copy);
        run(command, b"")
    };
    let claimed = on_copy("claim mail -w w").text().to_owned();
    let receipt = claimed.lines().next().unwrap();
    let epoch: u64 = receipt.strip_prefix("1.1-").unwrap().parse().unwrap();
    assert!(epoch > 1);
    for stranger in ["1.1", "1.1-2"] {
        assert_eq!(on_copy(&format!("ack {stranger}")).code, 4);
    }
    assert_eq!(on_copy(&format!("ack {receipt}")).code, 0);
}

#[test]
fn what_is_exported_can_be_imported() {
    let place = Place::new();
    let payload: Vec<u8> = b"{\"b\": 1,\n \"a\": 1.50}".to_vec();
    place.run_with(
        ["enqueue", "mail", "-", "--key", "k", "--priority", "3", "--max-attempts", "4", "--max-deferrals", "5"],
        &payload,
    );
    place.run_with(
        ["enqueue", "post", "-", "--group", "g", "--at", "2100-01-01T00:00:00Z", "--ttl", "9999d"],
        b"\x00\xff",
    );
    place.run(["enqueue", "mail", "\"quoted\""]);
    place.ok("enqueue mail rejected");
    place.ok("enqueue mail acked");
    place.ok("route 3 queued");
    place.ok("claim --id 1 -w w");
    place.ok("claim --id 4 -w w");
    place.ok("reject 4.1 --error no");
    place.ok("cancel 5");
    let exported = place.ok("export");
    assert!(exported.err.contains("3 live messages and 1 dead letter"), "{}", exported.err);
    assert_eq!(exported.json().len(), 4);

    let other = Place::new();
    let input =
        [exported.out.as_slice(), b"{\"queue\":\"mail\"}\nnonsense\n{\"queue\":\"mail\",\"payload\":{\"x\":1}}\n"]
            .concat();
    let imported = other.run_with(["import", "--json"], &input);
    assert_eq!(imported.code, 1);
    assert!(
        imported.err.contains("line 5: it has neither payload") && imported.err.contains("line 6: "),
        "{}",
        imported.err
    );
    let lines: Vec<_> =
        imported.json().iter().map(|row| (row["line"].as_i64().unwrap(), row["id"].as_i64().unwrap())).collect();
    assert_eq!(lines, [(1, 1), (2, 2), (3, 3), (4, 4), (7, 5)]);
    let store = other.store();
    let show = |id: i64| store.show(id).unwrap().unwrap();
    let first = show(1);
    assert_eq!(first.payload, Some(payload));
    assert_eq!(
        (first.status, first.key.as_deref(), first.priority, first.attempts),
        (Status::Pending, Some("k"), 3, 1)
    );
    assert_eq!((first.max_attempts, first.max_deferrals), (4, 5));
    let second = show(2);
    assert_eq!(
        (second.queue.as_str(), second.group.as_deref(), second.due_at),
        ("post", Some("g"), Some(4_102_444_800_000))
    );
    assert_eq!(second.payload, Some(b"\x00\xff".into()));
    let drift = second.expires_at.unwrap() - place.store().show(2).unwrap().unwrap().expires_at.unwrap();
    assert!(drift.abs() < 60_000, "{drift}");
    assert_eq!((show(3).status, show(3).payload), (Status::Queued, Some(b"\"quoted\"".into())));
    assert_eq!((show(4).status, show(4).payload), (Status::Dead, Some(b"rejected".into())));
    assert_eq!(show(5).payload, Some(b"{\"x\":1}".into()));

    let again = other.run_with(["import"], exported.text().lines().next().unwrap().as_bytes());
    assert!(again.err.contains("0 messages stored, 1 there already"), "{}", again.err);
    assert_eq!(place.ok("export post").text().lines().count(), 1);
}

#[test]
fn a_message_that_no_queue_accepts_does_not_stop_an_import() {
    let place = Place::new();
    let input = "{\"queue\":\"q\",\"payload\":\"a\"}\n{\"queue\":\"q\",\"payload\":\"b\",\"priority\":99999}\n{\"queue\":\"\",\"payload\":\"c\"}\n{\"queue\":\"q\",\"payload\":\"d\",\"due_at\":9223372036854775807}\n";
    let ran = place.run_with(["import"], input.as_bytes());
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("line 2: priority 99999") && ran.err.contains("line 3: queue name"), "{}", ran.err);
    assert!(ran.err.contains("line 4: due_at 9223372036854775807 is out of range"), "{}", ran.err);
    assert_eq!(place.ok("list --json").json().len(), 1);
}

#[test]
fn prune_deletes_what_is_past_its_retention() {
    let place = Place::new();
    place.ok("enqueue mail x");
    place.ok("enqueue mail y --ttl 0s");
    place.ok("claim --id 1 -w w");
    place.ok("ack 1.1 --retention 1h");
    assert_eq!(place.show(1)["status"], "done");
    place.ok("enqueue mail z");
    place.ok("claim --id 3 -w w");
    place.ok("ack 3.1 --retention 1ms");
    place.ok("prune --json");
    // How long a message is kept was said when it was acked; whoever prunes has no say in it.
    assert_eq!(place.show(1)["status"], "done");
    assert_eq!(place.show(2)["status"], "dead");
    place.fails("show 3", 3);
}

#[test]
fn completions_and_manual_name_every_command() {
    let commands = "demo enqueue claim ack fail reject defer limited release extend route cancel stats list show why retry-queue stuck gate pause resume queue workers dead doctor backup restore export import prune completions man";
    let man = run(relet(["man"]), b"");
    let bash = run(relet(["completions", "bash"]), b"");
    let help = run(relet(["--help"]), b"");
    assert_eq!((man.code, bash.code, help.code), (0, 0, 0));
    for command in commands.split(' ') {
        assert!(man.text().contains(&format!(".SH \"RELET {}\"", command.to_uppercase())), "{command}");
        assert!(bash.text().contains(command) && help.text().contains(command), "{command}");
        assert_eq!(run(relet([command, "--help"]), b"").code, 0);
    }
    let usage = "[OPTIONS] <QUEUE>... -- <COMMAND>...";
    assert!(run(relet(["work", "--help"]), b"").text().contains(&format!("relet work {usage}")));
    assert!(man.text().replace('\\', "").contains(&format!("relet workfR {usage}")));
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(!run(relet(["completions", shell]), b"").out.is_empty());
    }
}

#[test]
fn the_demo_shows_the_failure_and_its_cure() {
    let place = Place::new();
    let mut command = relet(["demo", "--messages", "40", "--workers", "3", "--json"]);
    command.env("TMPDIR", &place.folder);
    let ran = run(command, b"");
    assert_eq!(ran.code, 0, "{}", ran.err);
    let rows = ran.json();
    let number = |row: usize, name: &str| rows[row][name].as_u64().unwrap();
    assert_eq!((&rows[0]["claim"], &rows[1]["claim"]), (&"naive".into(), &"relet".into()));
    assert_eq!((number(0, "enqueued"), number(1, "enqueued")), (40, 40));
    assert!(number(0, "stuck") > 0 && number(0, "done") + number(0, "stuck") == 40 && number(0, "reclaimed") == 0);
    assert_eq!((number(1, "done"), number(1, "stuck"), number(1, "dead")), (40, 0, 0));
    assert!(number(1, "deferred") > 0 && number(1, "reclaimed") == number(1, "deferred"));
    assert!((1..=number(1, "deferred")).contains(&number(1, "gate_closed")));
    for name in ["gate_closed", "taken_over", "taken_over_ms"] {
        assert!(rows[0][name].is_null() && rows[1][name].is_u64(), "{name}");
    }
    assert_eq!(place.files(), Vec::<OsString>::new());
}

#[test]
fn the_demo_ends_for_any_number_and_keeps_its_store_if_told_to() {
    for messages in ["0", "1"] {
        let ran = run(relet(["demo", "--messages", messages, "--json"]), b"");
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert_eq!(ran.json()[1]["done"].to_string(), messages);
    }
    let place = Place::new();
    let mut command = relet(["demo", "--messages", "3", "--workers", "1", "--keep"]);
    command.env("TMPDIR", &place.folder);
    let ran = run(command, b"");
    assert!(ran.text().contains("stuck in processing"));
    let kept = place.folder.join(place.files().pop().unwrap()).join("relet.db");
    assert!(ran.err.contains(kept.to_str().unwrap()), "{}", ran.err);
    assert_eq!(Store::open_read_only(kept).unwrap().stats().unwrap().queues[0].acked, 3);
}

#[cfg(unix)]
#[test]
fn a_demo_that_is_stopped_leaves_nothing_behind() {
    let place = Place::new();
    let mut command = relet(["demo", "--messages", "5000"]);
    let mut child = command.env("TMPDIR", &place.folder).spawn().unwrap();
    let lines = lines_of(child.stderr.take().unwrap());
    assert!(lines.recv_timeout(PATIENCE).unwrap().contains("5000 messages"));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(end(child), 130);
    assert_eq!(place.files(), Vec::<OsString>::new());
}
