//! What a call is to do, from the environment. The script `run` sets all of it; the defaults are for a call by hand.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

pub struct Knobs {
    /// The folder of this run: rows and the files under test.
    pub out: PathBuf,
    /// Deep backlogs, filled once and copied afterwards.
    pub templates: PathBuf,
    /// W1 to W9, SHOW (what the connections say of themselves), or DISK.
    pub work: String,
    /// FULL or NORMAL; empty for both.
    pub class: String,
    pub round: u32,
    /// How long a measurement takes.
    pub time: Duration,
    /// How many messages lie ready in W2.
    pub backlog: usize,
    /// How many lie ready in W6.
    pub depths: Vec<usize>,
    /// How many lie in the way in W6.
    pub behind: usize,
    /// Whether that part of W6 is run at all.
    pub states: bool,
    /// How many wake-ups are timed in W7.
    pub wakes: usize,
    /// How long W9 takes, how many messages it moves a second, and how many lie there meanwhile.
    pub minute: Duration,
    pub rate: usize,
    pub live: usize,
    /// How long to wait, at most, for others to leave the processors alone.
    pub quiet: Duration,
}

pub fn knobs() -> &'static Knobs {
    static KNOBS: OnceLock<Knobs> = OnceLock::new();
    KNOBS.get_or_init(|| {
        let out = PathBuf::from(text("PEERS_OUT", "made/by-hand"));
        let templates = text("PEERS_TEMPLATES", "");
        Knobs {
            templates: if templates.is_empty() { out.join("templates") } else { templates.into() },
            out,
            work: text("PEERS_WORK", "W1"),
            class: text("PEERS_CLASS", ""),
            round: number("PEERS_ROUND", 1),
            time: seconds("SECS", 1.0),
            backlog: number("W2_READY", 20_000),
            depths: text("W6_READY", "1000,100000,1000000").split(',').map(parse).collect(),
            behind: number("W6_BEHIND", 1_000_000),
            states: number("W6_STATES", 1) == 1,
            wakes: number("W7_WAKES", 60),
            minute: seconds("W9_SECS", 60.0),
            rate: number("W9_RATE", 200),
            live: number("W9_LIVE", 5_000),
            quiet: seconds("QUIET", 2.0),
        }
    })
}

fn text(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn number<T: FromStr + ToString>(name: &str, default: T) -> T {
    parse(&text(name, &default.to_string()))
}

fn parse<T: FromStr>(value: &str) -> T {
    value.parse().unwrap_or_else(|_| panic!("{value:?} is not a number"))
}

fn seconds(name: &str, default: f64) -> Duration {
    Duration::from_secs_f64(number(name, default))
}
