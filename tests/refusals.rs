//! Whatever text comes from outside and cannot be taken is refused with the value, the limit and the next step, in relet's own words.
#![cfg(feature = "cli")]

mod command;

use command::{Place, relet, run};

/// A kind of text: options that take it, what it may be written as, and what is refused because of what.
struct Kind {
    takes: &'static [&'static str],
    form: &'static str,
    refused: &'static [(&'static str, &'static str)],
}

const KINDS: &[Kind] = &[
    Kind {
        takes: &["enqueue q x --at"],
        form: "write it as 2030-01-31T08:00:00Z or 2030-01-31T08:00:00+02:00, up to 9999-12-30T22:00:00Z",
        refused: &[
            ("", "is empty"),
            ("10000-01-01T00:00:00Z", "is beyond the year 9999"),
            ("+010000-01-01T00:00:00Z", "is beyond the year 9999"),
            ("99999999999999999999-01-01T00:00:00Z", "is beyond the year 9999"),
            ("9999-12-31T23:59:59Z", "is beyond the last one"),
            ("9999-12-30T22:00:01Z", "is beyond the last one"),
            ("2030-01-31", "has no time of day"),
            ("2030-01-31T08:00:00", "has no offset"),
            ("2030-13-01T00:00:00Z", "there is no such date"),
            ("2030-02-30T00:00:00Z", "there is no such date"),
            ("2030-01-31T25:00:00Z", "there is no such date, time"),
            ("2030-01-31T08:00:00+99:00", "there is no such date, time or offset"),
            ("tomorrow", "is no date and time"),
            ("1700000000", "is no date and time"),
            ("-", "is no date and time"),
            ("é", "is no date and time"),
        ],
    },
    Kind {
        takes: &[
            "enqueue q x --delay",
            "enqueue q x --ttl",
            "claim q -w w --lease",
            "claim q -w w --wait",
            "stuck --older-than",
            "pause q --for",
            "stats --retention",
            "defer 1.1 --for",
            "limited 1.1 --retry-after",
            "fail 1.1 --error e --retry-in",
            "extend 1.1 --lease",
        ],
        form: "write it as 30s, 5m, 1h30m, 250ms or 2d",
        refused: &[
            ("", "is empty"),
            ("5", "has a number without a unit"),
            ("1.5h", "has a number without a unit"),
            ("5x", "cannot be read"),
            ("-5s", "does not begin with a number"),
            ("36526d", "is longer than 36525d"),
            ("99999999999999999999s", "is longer than 36525d"),
            ("forever", "does not begin with a number"),
        ],
    },
    Kind {
        takes: &["stats --busy-wait"],
        form: "or at most 1d",
        refused: &[("25h", "is longer than 1d"), ("36525d", "is longer than 1d")],
    },
    Kind {
        takes: &["gate set g --rate"],
        form: "write it as 100/1m or 5/250ms",
        refused: &[
            ("", "has no / in it"),
            ("100", "has no / in it"),
            ("/1m", "does not begin with a number of messages"),
            ("+1/1m", "does not begin with a number of messages"),
            ("4294967296/1m", "is of more than 4294967295 messages"),
            ("99999999999999999999/1m", "is of more than 4294967295 messages"),
        ],
    },
    Kind {
        takes: &["queue set q --retry"],
        form: "write it as 30s",
        refused: &[("1h..1s", "ends below its beginning"), ("x", "does not begin with a number"), ("1s..", "is empty")],
    },
    Kind {
        takes: &["show", "why", "cancel"],
        form: "an id is a whole number from 1 on",
        refused: &[("0", "cannot be read"), ("x", "cannot be read"), ("9223372036854775808", "cannot be read")],
    },
    Kind {
        takes: &["ack"],
        form: "",
        refused: &[
            ("x", "cannot be read"),
            ("1.", "cannot be read"),
            ("1.2.3", "cannot be read"),
            ("0.1", "cannot be read"),
        ],
    },
];

/// Words of libraries that no user knows.
const INNER: [&str; 9] =
    ["parameter", "jiff", "parsing", "ParseIntError", "Overflow", "overflow", "failed to parse", "ASCII", "component"];

#[test]
fn what_is_refused_is_named_with_its_limit_and_the_next_step() {
    let mut found = Vec::new();
    for kind in KINDS {
        for takes in kind.takes {
            for (text, because) in kind.refused {
                let mut words: Vec<String> = takes.split(' ').map(str::to_owned).collect();
                match words.last_mut() {
                    Some(option) if option.starts_with("--") => option.push_str(&format!("={text}")),
                    _ => words.push((*text).to_owned()),
                }
                let place = Place::new();
                let ran = run(place.command(&words), b"");
                let named = text.is_empty() || ran.err.contains(text);
                let inner = INNER.iter().any(|word| ran.err.contains(word));
                let says = ran.err.contains(because) && ran.err.contains(kind.form);
                if ran.code != 2 || !named || inner || !says || !place.files().is_empty() {
                    found.push(format!("{words:?}: {} {}", ran.code, ran.err));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn what_is_at_the_limit_is_taken() {
    let place = Place::new();
    for line in [
        "enqueue q x --at=9999-12-30T22:00:00Z",
        "enqueue q x --at=1969-12-31T00:00:00Z",
        "enqueue q x --delay=36525d",
        "stats --busy-wait=1d",
        "queue set q --retry=0s..36525d",
    ] {
        place.ok(line);
    }
    let ran = run(relet(["--help"]), b"");
    assert_eq!(ran.code, 0);
}
