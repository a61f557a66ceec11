//! The command line steers what is handed out: gates, pauses, and what a queue says of its messages.
#![cfg(feature = "cli")]

mod command;

use command::{Place, run};
use relet::rusqlite::Connection;
use relet::{INSTANT_MAX, Store};
use serde_json::Value;

const HOUR_MS: i64 = 3_600_000;

/// The gate as `gate list --json` has it.
fn gate(place: &Place, name: &str) -> Value {
    place.ok("gate list --json").json().into_iter().find(|gate| gate["gate"] == name).expect("the gate is listed")
}

/// The one number that a query finds.
fn number(place: &Place, sql: &str) -> i64 {
    Connection::open(place.db()).unwrap().query_row(sql, [], |row| row.get(0)).unwrap()
}

#[test]
fn what_names_a_closed_gate_waits_until_it_is_opened() {
    let place = Place::new();
    place.ok("enqueue calls a --gate api");
    place.ok("enqueue calls b");
    assert_eq!(place.show(1)["gate"], "api");
    assert!(place.ok("show 1").text().contains("gate        api\n"));
    assert!(place.ok("list").text().contains(" api "));
    assert_eq!(place.ok("gate close api").line(), "api: closed until it is opened, no limits");

    assert_eq!(place.ok("claim calls -w w").text(), "2.1\nb\n");
    place.fails("claim calls -w w", 3);
    let refused = place.fails("claim --id 1 -w w", 4);
    assert!(refused.err.contains("waiting behind gate \"api\" until it is opened"), "{}", refused.err);
    let why = place.ok("why 1 --json").json().remove(0);
    assert_eq!((&why["why"], &why["gate"], &why["gated_until"]), (&"gated".into(), &"api".into(), &INSTANT_MAX.into()));
    let text = "message 1 is behind gate \"api\", which lets nothing pass until it is opened";
    assert_eq!(place.ok("why 1").line(), text);
    assert_eq!(
        (&gate(&place, "api")["closed_until"], &gate(&place, "api")["waiting"]),
        (&INSTANT_MAX.into(), &1.into())
    );

    assert_eq!(place.ok("gate open api").line(), "api: opening, 1 at a time for now, no limits");
    assert_eq!(gate(&place, "api")["closed_until"], Value::Null);
    assert_eq!(place.ok("claim calls -w w").text(), "1.1\na\n");
    assert_eq!(gate(&place, "api")["held"], 1);
}

#[test]
fn a_gate_that_is_closed_for_a_while_opens_by_itself() {
    let place = Place::new();
    place.ok("enqueue calls a --gate api");
    let closed = place.ok("gate close api --for 1h --json").json().remove(0);
    let left = closed["closed_until"].as_i64().unwrap() - place.show(1)["enqueued_at"].as_i64().unwrap();
    assert!((HOUR_MS..2 * HOUR_MS).contains(&left), "{left}");
    // It is never closed for less than it was.
    place.ok("gate close api --for 1s");
    assert_eq!(gate(&place, "api")["closed_until"], closed["closed_until"]);
    assert!(place.ok("why 1").line().contains("(in "));
    assert!(place.ok("gate list").text().contains("closed until 2"));

    place.ok("gate open api");
    place.ok("gate close api --for 300ms");
    assert_eq!(place.ok("claim calls -w w --wait 60s").text(), "1.1\na\n");
}

#[test]
fn as_many_as_were_allowed_pass_at_a_time() {
    let place = Place::new();
    assert_eq!(place.ok("gate set api --concurrency 1").line(), "api: open, at most 1 at a time");
    place.ok("enqueue calls a --gate api");
    place.ok("enqueue calls b --gate api");
    assert_eq!(place.ok("claim calls -w w -n 5").text(), "1.1\ta\n");
    let why = place.ok("why 2 --json").json().remove(0);
    assert_eq!((&why["why"], &why["gated_until"]), (&"gated".into(), &Value::Null));
    assert!(place.ok("why 2").line().ends_with("lets the next one pass when one that has passed is settled"));
    let refused = place.fails("claim --id 2 -w w", 4);
    assert!(
        refused.err.contains("behind gate \"api\" for a message that has passed it to be settled"),
        "{}",
        refused.err
    );
    place.ok("ack 1.1");
    assert_eq!(place.ok("claim calls -w w").text(), "2.1\nb\n");
}

#[test]
fn no_more_pass_than_the_rate_allows() {
    let place = Place::new();
    let set = place.ok("gate set api --rate 1/7d --burst 2");
    assert_eq!(set.line(), "api: open, 1/7d with a burst of 2");
    for payload in ["a", "b", "c"] {
        place.ok(&format!("enqueue calls {payload} --gate api"));
    }
    assert_eq!(place.ok("claim calls -w w -n 5").text(), "1.1\ta\n2.1\tb\n");
    let seen = gate(&place, "api");
    for (member, value) in [("rate", 1_i64), ("period_ms", 7 * 24 * HOUR_MS), ("burst", 2), ("held", 2), ("waiting", 1)]
    {
        assert_eq!(seen[member], value, "{member}");
    }
    assert_eq!((&seen["closed_until"], &seen["concurrency"]), (&Value::Null, &Value::Null));
    let wait = place.ok("why 3 --json").json()[0]["gated_until"].as_i64().unwrap();
    assert!(wait > place.show(3)["enqueued_at"].as_i64().unwrap() + 24 * HOUR_MS);

    // The new limits replace the old ones, all of them.
    place.ok("gate set api --concurrency 2");
    assert_eq!((&gate(&place, "api")["rate"], &gate(&place, "api")["concurrency"]), (&Value::Null, &2.into()));
    place.fails("claim calls -w w", 3);
    assert_eq!(place.ok("gate set api --no-limits").line(), "api: open, no limits");
    assert_eq!(place.ok("claim calls -w w").text(), "3.1\nc\n");
}

#[test]
fn the_gates_are_listed_by_name() {
    let place = Place::new();
    place.ok("enqueue calls a");
    let none = place.ok("gate list");
    assert!(none.text().is_empty() && none.err.contains("no gates"));
    assert_eq!(place.ok("gate list --json").text(), "");
    place.ok("gate set slow --rate 3/1h30m --concurrency 4");
    place.ok("enqueue calls b --gate api");
    let table = place.ok("gate list").text().to_owned();
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["GATE", "STATE", "CONCURRENCY", "RATE", "BURST", "HELD", "WAITING"]);
    assert_eq!(lines[1], ["api", "open", "-", "-", "-", "0", "1"]);
    assert_eq!(lines[2], ["slow", "open", "4", "3/1h30m", "1", "0", "0"]);
}

#[test]
fn what_was_limited_waits_with_its_siblings_and_costs_no_attempt() {
    let place = Place::new();
    place.ok("enqueue calls a --gate api");
    place.ok("enqueue calls b --gate api");
    place.ok("enqueue calls c");
    place.ok("claim --id 1 -w w");
    let limited = place.ok("limited 1.1 --retry-after 1h --json").json().remove(0);
    assert_eq!((&limited["receipt"], &limited["outcome"]), (&"1.1".into(), &"limited".into()));
    let message = place.show(1);
    assert_eq!((&message["attempts"], &message["deferrals"]), (&0.into(), &1.into()));
    assert_eq!(limited["status"], message["status"]);
    let left = gate(&place, "api")["closed_until"].as_i64().unwrap() - message["enqueued_at"].as_i64().unwrap();
    assert!((HOUR_MS..2 * HOUR_MS).contains(&left), "{left}");
    assert_eq!(place.ok("claim calls -w w -n 5").text(), "3.1\tc\n");

    // Settled is settled, as with every other verb.
    place.ok("limited 1.1 --retry-after 1h");
    assert!(place.fails("limited 1.2 --retry-after 1h", 4).err.contains("stale"));
    place.fails("limited 99.1 --retry-after 1h", 3);
    // Without a gate there is none to close.
    place.ok("limited 3.1 --retry-after 1h");
    assert_eq!((&place.show(3)["attempts"], &place.show(3)["deferrals"]), (&0.into(), &1.into()));
    assert_eq!(place.ok("gate list --json").json().len(), 1);
}

#[test]
fn nothing_of_a_paused_queue_is_handed_out_until_it_is_resumed() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue post z");
    place.ok("claim mail -w w");
    assert_eq!(place.ok("pause mail").line(), "mail: paused until it is resumed");
    place.ok("enqueue mail b");
    place.fails("claim mail -w w", 3);
    let refused = place.fails("claim --id 3 -w w", 4);
    assert!(refused.err.contains("message 3 is in a queue that is paused until it is resumed"), "{}", refused.err);
    assert_eq!(place.ok("why 3").line(), "message 3 is in a queue that is paused until it is resumed");
    let why = place.ok("why 3 --json").json().remove(0);
    assert_eq!((&why["why"], &why["paused_until"]), (&"paused".into(), &INSTANT_MAX.into()));
    let stats = place.ok("stats --json").json();
    assert_eq!((&stats[0]["paused_until"], &stats[1]["paused_until"]), (&INSTANT_MAX.into(), &Value::Null));
    assert!(place.ok("stats").text().contains("PAUSED UNTIL") && place.ok("stats").text().contains("resumed"));
    // What is being worked on goes on, and so do other queues.
    place.ok("extend 1.1 --lease 1h");
    place.ok("ack 1.1");
    assert_eq!(place.ok("claim post -w w").text(), "2.1\nz\n");

    assert_eq!(place.ok("resume mail").line(), "mail: not paused");
    assert_eq!(place.ok("resume mail --json").text(), "{\"queue\":\"mail\",\"paused_until\":null}\n");
    assert_eq!(place.ok("claim mail -w w").text(), "3.1\nb\n");
}

#[test]
fn a_queue_that_is_paused_for_a_while_goes_on_by_itself() {
    let place = Place::new();
    place.ok("enqueue mail a");
    let paused = place.ok("pause mail --for 1h --json").json().remove(0);
    let left = paused["paused_until"].as_i64().unwrap() - place.show(1)["enqueued_at"].as_i64().unwrap();
    assert!(paused["queue"] == "mail" && (HOUR_MS..2 * HOUR_MS).contains(&left), "{left}");
    assert!(place.ok("why 1").line().contains("paused until 2") && place.ok("why 1").line().ends_with(')'));
    place.ok("resume mail");
    place.ok("pause mail --for 300ms");
    assert_eq!(place.ok("claim mail -w w --wait 60s").text(), "1.1\na\n");
}

#[test]
fn a_queue_says_what_its_messages_do_not_say_themselves() {
    let place = Place::new();
    assert_eq!(
        place.ok("queue set mail --gate api --max-attempts 2 --lease 2h --retry 3h --ageing 90s").line(),
        "mail: set"
    );
    place.ok("enqueue mail a");
    place.ok("enqueue mail b --gate other --max-attempts 9");
    assert_eq!((&place.show(1)["gate"], &place.show(1)["max_attempts"]), (&"api".into(), &2.into()));
    assert_eq!((&place.show(2)["gate"], &place.show(2)["max_attempts"]), (&"other".into(), &9.into()));
    place.ok("claim --id 1 -w w");
    let left = place.show(1)["lease_left_ms"].as_i64().unwrap();
    assert!((HOUR_MS..=2 * HOUR_MS).contains(&left), "{left}");
    place.ok("fail 1.1 --error boom");
    let message = place.show(1);
    let wait = message["due_at"].as_i64().unwrap() - message["claimed_at"].as_i64().unwrap();
    assert!((3 * HOUR_MS..4 * HOUR_MS).contains(&wait), "{wait}");
    assert_eq!(number(&place, "SELECT ageing_ms FROM relet_queues"), 90_000);

    // What is said now replaces what was said before, all of it.
    let set = place.ok("queue set mail --retry 1s..5s --json");
    assert_eq!(set.text(), "{\"queue\":\"mail\",\"outcome\":\"set\"}\n");
    place.ok("enqueue mail c");
    assert_eq!((&place.show(3)["gate"], &place.show(3)["max_attempts"]), (&Value::Null, &25.into()));
    place.ok("queue set mail --no-defaults");
    let kept =
        "SELECT count(*) FROM relet_queues WHERE coalesce(max_attempts, lease_ms, retry, gate, ageing_ms) IS NOT NULL";
    assert_eq!(number(&place, kept), 0);
}

#[test]
fn a_name_that_is_not_there_may_be_a_slip() {
    let place = Place::new();
    place.ok("enqueue mail a");
    assert!(place.fails("gate open nosuch", 3).err.contains("no gate \"nosuch\" in this store; `relet gate list`"));
    assert!(place.fails("resume nosuch", 3).err.contains("no queue \"nosuch\""));
    assert_eq!(place.ok("gate list --json").text(), "");
    // To close or pause ahead is allowed, and said.
    assert!(place.ok("gate close ahead").err.contains("gate \"ahead\" is a new one"));
    assert!(place.ok("pause later").err.contains("queue \"later\" is a new one"));
    for line in ["gate close ahead", "gate open ahead", "pause later", "resume later", "gate set ahead --concurrency 1"]
    {
        assert_eq!(place.ok(line).err, "", "{line}");
    }
}

#[test]
fn setting_up_makes_a_store_and_nothing_else_does() {
    for line in ["gate set api --concurrency 3", "queue set mail --gate api"] {
        let place = Place::new();
        place.ok(line);
        let store = Store::open_read_only(place.db()).unwrap();
        assert_eq!(store.gates().unwrap().len(), 1, "{line}");
    }
    for line in [
        "gate close api",
        "gate close api --for 1s",
        "gate open api",
        "gate list",
        "pause mail",
        "resume mail",
        "workers",
        "limited 1.1 --retry-after 1s",
    ] {
        let place = Place::new();
        assert!(place.fails(line, 3).err.contains("there is no store at"), "{line}");
        assert!(place.files().is_empty(), "{line}");
    }
}

#[test]
fn what_no_gate_and_no_queue_can_have_is_a_usage_error() {
    let place = Place::new();
    place.ok("enqueue mail a");
    let long = "x".repeat(600);
    for line in [
        "gate",
        "gate frobnicate",
        "gate set",
        "gate set api",
        "gate set api --burst 3",
        "gate set api --concurrency 2 --burst 3",
        "gate set api --concurrency 0",
        "gate set api --concurrency -1",
        "gate set api --concurrency 1000001",
        "gate set api --concurrency 99999999999",
        "gate set api --rate 5",
        "gate set api --rate 5/m",
        "gate set api --rate 0/1m",
        "gate set api --rate -1/1m",
        "gate set api --rate 1000001/1m",
        "gate set api --rate 1/0s",
        "gate set api --rate 1/8d",
        "gate set api --rate 1/1m --burst 0",
        "gate set api --no-limits --concurrency 1",
        "gate set api --no-limits --burst 1",
        "gate close",
        "gate close api --for soon",
        "gate open",
        "gate list api",
        "pause",
        "pause mail --for 1.5h",
        "resume",
        "limited 1.1",
        "limited --retry-after 1s",
        "limited 1 --retry-after 1s",
        "limited 1.1 --retry-after -1s",
        "queue",
        "queue set mail",
        "queue set mail --lease 0s",
        "queue set mail --lease 367d",
        "queue set mail --max-attempts 0",
        "queue set mail --retry 1h..1s",
        "queue set mail --retry often",
        "queue set mail --ageing 0s",
        "queue set mail --ageing 36525d",
        "queue set mail --no-defaults --gate api",
        "workers all",
        &format!("gate set {long} --no-limits"),
        &format!("gate close {long}"),
        &format!("pause {long}"),
        &format!("queue set mail --gate {long}"),
        &format!("queue set {long} --no-defaults"),
        &format!("enqueue mail x --gate {long}"),
    ] {
        place.fails(line, 2);
    }
    for args in [["gate", "close", ""], ["gate", "close", "a\nb"], ["queue", "set", "--gate="]] {
        assert_eq!(place.run(args).code, 2, "{args:?}");
    }
    let ran = place.fails("gate set api --rate 100/1x", 2);
    assert!(ran.err.contains("the duration \"1x\" cannot be read"), "{}", ran.err);
    let ran = place.fails("gate set api --rate 1000001/1m", 2);
    assert!(ran.err.contains("rate 1000001") && ran.err.contains("1000000"), "{}", ran.err);
    assert_eq!(place.ok("gate list --json").text(), "");
    assert_eq!(place.ok("stats --json").json().len(), 2);
}

#[test]
fn a_locked_store_is_busy_for_gates_and_pauses_and_can_be_looked_at() {
    let place = Place::new();
    place.ok("enqueue mail a --gate api");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch("BEGIN IMMEDIATE").unwrap();
    for line in ["gate set api --no-limits", "gate close api", "gate open api", "pause mail", "resume mail"] {
        place.fails(&format!("{line} --busy-wait 20ms"), 75);
    }
    place.ok("gate list");
    place.ok("workers");
}

#[test]
fn gate_and_tick_are_exported_and_the_gate_is_imported() {
    let place = Place::new();
    place.ok("enqueue calls a --gate api");
    place.ok("enqueue calls b");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch("UPDATE relet_details SET tick_at = 1700000000000 WHERE message = 1").unwrap();
    drop(conn);
    assert_eq!((&place.show(1)["tick_at"], &place.show(2)["tick_at"]), (&1_700_000_000_000_i64.into(), &Value::Null));
    assert!(place.ok("show 1").text().contains("tick        2023-11-14T22:13:20Z"));
    let exported = place.ok("export");
    let rows = exported.json();
    assert_eq!((&rows[0]["gate"], &rows[0]["tick_at"]), (&"api".into(), &1_700_000_000_000_i64.into()));
    assert_eq!((&rows[1]["gate"], &rows[1]["tick_at"]), (&Value::Null, &Value::Null));

    let other = Place::new();
    assert_eq!(other.run_with(["import"], &exported.out).code, 0);
    assert_eq!((&other.show(1)["gate"], &other.show(2)["gate"]), (&"api".into(), &Value::Null));
    let line = b"{\"queue\":\"calls\",\"payload\":\"x\",\"gate\":\"\"}\n";
    let bad = run(other.command(["import"]), line);
    assert_eq!(bad.code, 1);
    assert!(bad.err.contains("line 1: gate"), "{}", bad.err);
}
