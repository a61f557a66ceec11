//! Schedules are set, listed, run and removed from the command line, and the store's numbers are there for a monitoring system.
#![cfg(all(feature = "cli", unix))]

mod command;

use std::process::Command;

use command::{PATIENCE, Place, Ran, end, lines_of, run};
use relet::Status;
use relet::rusqlite::Connection;
use serde_json::{Value, json};

fn schedule(place: &Place, name: &str) -> Value {
    let all = place.ok("schedule list --json").json();
    all.into_iter().find(|schedule| schedule["schedule"] == name).expect("it is listed")
}

/// The schedule's next tick is due since so long.
fn set_due(place: &Place, name: &str, ms_ago: i64) {
    let conn = Connection::open(place.db()).unwrap();
    let sql = "UPDATE relet_schedules SET next_at = set_at - ?2, set_at = set_at - ?2 - every_ms WHERE name = ?1";
    assert_eq!(conn.execute(sql, (name, ms_ago)).unwrap(), 1);
}

fn pending(place: &Place, queue: &str) -> u64 {
    let stats = place.store().stats().unwrap();
    stats.queues.iter().find(|known| known.queue == queue).map_or(0, |known| known.count(Status::Pending))
}

fn add<const N: usize>(place: &Place, args: [&str; N]) -> Ran {
    let ran = place.run(["schedule", "add"].into_iter().chain(args));
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran
}

#[test]
fn a_schedule_is_stored_and_listed_as_it_was_set() {
    let place = Place::new();
    let set = place.ok("schedule add beat beats tick --every 1h30m --catch-up 5 --priority 3 --gate api --key k");
    assert!(set.line().starts_with("beat: every 1h30m into \"beats\", next 2"), "{}", set.line());
    assert!(set.line().ends_with("(in 1h29m)") || set.line().ends_with("(in 1h30m)"), "{}", set.line());
    add(&place, ["nightly", "reports", "--cron", "0 3 * * MON-FRI", "--tz", "Europe/Berlin"]);
    add(&place, ["often", "beats", "--every", "1s", "--catch-up", "skip"]);

    let beat = schedule(&place, "beat");
    let next = beat["next_at"].as_i64().unwrap();
    assert_eq!(
        beat,
        json!({"schedule": "beat", "queue": "beats", "every_ms": 5_400_000, "cron": null, "time_zone": null,
            "catch_up": 5, "next_at": next, "last_at": null, "priority": 3, "route": "pending", "key": "k",
            "group": null, "gate": "api", "ttl_ms": null, "max_attempts": null, "max_deferrals": null, "retry": null,
            "payload": "tick"})
    );
    let nightly = schedule(&place, "nightly");
    let of = |name: &str| nightly[name].clone();
    assert_eq!(
        (of("every_ms"), of("cron"), of("time_zone")),
        (Value::Null, json!("0 3 * * MON-FRI"), json!("Europe/Berlin"))
    );
    assert_eq!((of("catch_up"), of("payload"), of("queue")), (json!("one"), json!(""), json!("reports")));
    assert_eq!(of("next_at").as_i64().unwrap() % 3_600_000, 0);
    assert_eq!(schedule(&place, "often")["catch_up"], "skip");

    let table = place.ok("schedule list").text().to_owned();
    let rows: Vec<&str> = table.lines().collect();
    assert!(rows[0].starts_with("SCHEDULE") && rows.len() == 4, "{table}");
    assert!(rows[1].ends_with("priority 3, key k, gate api"), "{table}");
    assert!(rows[2].contains("0 3 * * MON-FRI in Europe/Berlin") && rows[2].ends_with(" -"), "{table}");

    // Set again, it ticks when it would have.
    let again = place.ok("schedule add beat beats other --every 1h30m --json").json().remove(0);
    assert_eq!((&again["next_at"], &again["payload"]), (&json!(next), &json!("other")));
    let moved = place.ok("schedule add beat beats --every 2h --json").json().remove(0);
    assert!(moved["next_at"].as_i64().unwrap() > next);
}

#[test]
fn what_is_due_is_enqueued_once() {
    let place = Place::new();
    let payload = [0, 0xff, b'\n'];
    let args = "schedule add beat beats - --every 1h --priority 3 --group g --gate api --ttl 1d --max-attempts 2 --max-deferrals 9";
    assert_eq!(place.run_with(args.split(' '), &payload).code, 0);
    let none = place.ok("schedule run --once --json").json().remove(0);
    assert_eq!((&none["enqueued"], &none["failed"]), (&json!(0), &json!([])));
    assert!((3_000_000..=3_600_000).contains(&none["next_ms"].as_i64().unwrap()));

    set_due(&place, "beat", 1_000);
    let due = schedule(&place, "beat")["next_at"].clone();
    assert_eq!(place.ok("schedule run --once").line(), "1 message enqueued");
    assert_eq!(place.ok("schedule run --once").line(), "0 messages enqueued");
    let message = place.show(1);
    for (name, value) in [
        ("queue", json!("beats")),
        ("priority", json!(3)),
        ("group", json!("g")),
        ("gate", json!("api")),
        ("max_attempts", json!(2)),
        ("max_deferrals", json!(9)),
        ("payload_base64", json!("AP8K")),
        ("tick_at", due.clone()),
    ] {
        assert_eq!(message[name], value, "{name}");
    }
    assert_eq!(message["expires_at"].as_i64().unwrap() - message["enqueued_at"].as_i64().unwrap(), 86_400_000);
    assert_eq!(schedule(&place, "beat")["last_at"], due);
}

#[test]
fn missed_ticks_are_made_up_for_as_the_schedule_says() {
    for (catch_up, enqueued) in [("skip", 0), ("one", 1), ("3", 3), ("1000", 6)] {
        let place = Place::new();
        place.ok(&format!("schedule add beat beats --every 1h --catch-up {catch_up}"));
        set_due(&place, "beat", 5 * 3_600_000 + 120_000);
        assert_eq!(place.ok("schedule run --once --json").json()[0]["enqueued"], enqueued, "{catch_up}");
        assert_eq!(pending(&place, "beats"), enqueued);
    }
}

#[test]
fn a_removed_schedule_leaves_its_messages() {
    let place = Place::new();
    place.ok("schedule add beat beats --every 1h");
    set_due(&place, "beat", 1_000);
    place.ok("schedule run --once");
    assert_eq!(place.ok("schedule remove beat").line(), "beat: removed");
    assert!(place.fails("schedule remove beat", 3).err.contains("there is no schedule \"beat\""));
    assert_eq!(pending(&place, "beats"), 1);
    let none = place.ok("schedule list");
    assert!(none.text().is_empty() && none.err.contains("no schedules"));
    place.ok("schedule add beat beats --every 1h");
    assert_eq!(place.ok("schedule remove beat --json").json(), [json!({"schedule": "beat", "outcome": "removed"})]);
}

#[test]
fn schedules_run_until_a_signal() {
    for name in ["TERM", "INT"] {
        let place = Place::new();
        place.ok("schedule add beat beats tick --every 100ms");
        let mut child = place.command(["schedule", "run"]).spawn().unwrap();
        let lines = lines_of(child.stdout.take().unwrap());
        for _ in 0..3 {
            let line = lines.recv_timeout(PATIENCE).unwrap();
            assert!(line.ends_with(" enqueued"), "{line}");
        }
        // Another process's schedule is seen, too.
        place.ok("schedule add other others tick --every 1ms");
        while pending(&place, "others") == 0 {
            lines.recv_timeout(PATIENCE).unwrap();
        }
        let kill = format!("kill -{name} {}", child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        assert_eq!(end(child), 0);
        // As many as were reported, and each tick once.
        let conn = Connection::open(place.db()).unwrap();
        let sql = "SELECT count(*) - count(DISTINCT d.tick_at) FROM relet_messages m JOIN relet_details d ON d.message = m.id WHERE m.queue = (SELECT id FROM relet_queues WHERE name = 'beats')";
        assert_eq!(conn.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap(), 0);
    }
}

#[test]
fn the_work_runs_the_schedules() {
    let place = Place::new();
    place.ok("schedule add beat beats tick --every 50ms");
    let mut command = command::relet(["work", "beats", "-d"]);
    command.arg(place.db()).args(["--", "sh", "-c", r#"echo "$(cat) $RELET_TICK_AT""#]);
    let mut child = command.spawn().unwrap();
    let lines = lines_of(child.stdout.take().unwrap());
    let ticks: Vec<i64> = (0..3)
        .map(|_| {
            let line = lines.recv_timeout(PATIENCE).unwrap();
            line.strip_prefix("tick ").unwrap_or_else(|| panic!("{line}")).parse().unwrap()
        })
        .collect();
    assert!(ticks.is_sorted_by(|a, b| a < b), "{ticks:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_schedule_that_cannot_be_run_holds_up_no_other() {
    let place = Place::new();
    place.ok("schedule add bad beats --every 1h");
    place.ok("schedule add good beats --every 1h");
    for name in ["bad", "good"] {
        set_due(&place, name, 1_000);
    }
    let conn = Connection::open(place.db()).unwrap();
    conn.execute("UPDATE relet_schedules SET every_ms = NULL, cron = '0 3 * * *', time_zone = 'Nowhere/At_All' WHERE name = 'bad'", [])
        .unwrap();
    let ran = place.fails("schedule run --once --json", 2);
    assert!(ran.err.contains("schedule \"bad\": time zone \"Nowhere/At_All\" is not known"), "{}", ran.err);
    assert_eq!((&ran.json()[0]["enqueued"], &ran.json()[0]["failed"]), (&json!(1), &json!(["bad"])));
}

#[test]
fn a_wrong_schedule_is_refused() {
    let place = Place::new();
    for (args, text) in [
        (&["n", "q"][..], "--every"),
        (&["n", "q", "--every", "soon"], "soon"),
        (&["n", "q", "--every", "0s"], "out of range"),
        (&["n", "q", "--every", "1s", "--cron", "* * * * *"], "cannot be used with"),
        (&["n", "q", "--every", "1s", "--tz", "UTC"], "--tz"),
        (&["n", "q", "--cron", "* * * * *"], "--tz"),
        (
            &["n", "q", "--cron", "* * * *", "--tz", "UTC"],
            "cron pattern \"* * * *\" cannot be used: it needs 5 fields, or 6",
        ),
        (&["n", "q", "--cron", "0 0 0 1 1 * 2030", "--tz", "UTC"], "cannot be used: it needs 5 fields, or 6"),
        (&["n", "q", "--cron", "0 0 * * FOO", "--tz", "UTC"], "cannot be used: illegal character 'F' in part 'FOO'"),
        (&["n", "q", "--cron", "0 0 30 2 *", "--tz", "UTC"], "it never comes"),
        (&["n", "q", "--cron", "* * * * *", "--tz", "Mars/Base"], "time zone \"Mars/Base\" is not known"),
        (&["n", "q", "--every", "1s", "--catch-up", "some"], "none of skip, one"),
        (&["n", "q", "--every", "1s", "--catch-up", "0"], "out of range"),
        (&["n", "q", "--every", "1s", "--delay", "1s"], "--delay"),
        (&["", "q", "--every", "1s"], "is empty"),
        (&["n", "", "--every", "1s"], "is empty"),
    ] {
        let ran = place.run(["schedule", "add"].into_iter().chain(args.iter().copied()));
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.err);
        assert!(ran.err.contains(text), "{args:?}: {}", ran.err);
    }
    let none = Place::new();
    for line in ["schedule list", "schedule remove x", "schedule run --once", "metrics"] {
        none.fails(line, 3);
    }
    assert!(none.files().is_empty());
}

#[test]
fn the_metrics_are_prometheus_text() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b --gate api");
    place.ok("gate close api");
    let ran = place.ok("metrics");
    for line in [
        "# TYPE relet_messages gauge",
        "relet_messages{queue=\"mail\",status=\"pending\"} 2",
        "# TYPE relet_acked_total counter",
        "relet_gate_closed{gate=\"api\"} 1",
    ] {
        assert!(ran.text().lines().any(|row| row == line), "{line}: {}", ran.text());
    }
    assert!(ran.text().ends_with('\n') && ran.err.is_empty());
    assert!(place.fails("metrics --json", 2).err.contains("stats --json"));
    // Looking makes and changes nothing.
    let before = place.files();
    let mut command = place.command(["metrics"]);
    command.stdout(command::closed_pipe());
    assert_eq!(run(command, b"").code, 0);
    assert_eq!(place.files(), before);
}
