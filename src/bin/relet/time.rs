//! Time on the command line: spans such as `1h30m`, instants in RFC 3339, and the one reader of the clocks in this program.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use relet::Retry;

/// The units of a span, the largest first, in milliseconds.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
/// Longest span that is accepted, in days: a hundred years. A longer one is a slip of the finger.
const DAYS_MAX: u64 = 36_525;
/// Longest busy wait that is accepted: a day.
const BUSY_WAIT_MAX: Duration = Duration::from_secs(86_400);

/// Reads a span: whole numbers with the units d, h, m, s and ms, the largest first, each at most once.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let shown = shown(text);
    let wrong =
        |problem: &str| Err(format!("the duration {shown:?} {problem}; write it as 30s, 5m, 1h30m, 250ms or 2d"));
    let (mut rest, mut units, mut total) = (text, UNITS.as_slice(), 0_u64);
    if rest.is_empty() {
        return wrong("is empty");
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let letters = rest[digits..].bytes().take_while(u8::is_ascii_lowercase).count();
        let (number, unit) = (&rest[..digits], &rest[digits..digits + letters]);
        if number.is_empty() {
            return wrong("does not begin with a number");
        }
        let Some(place) = units.iter().position(|(name, _)| *name == unit) else {
            return wrong(if unit.is_empty() { "has a number without a unit" } else { "cannot be read" });
        };
        let part = number.parse::<u64>().ok().and_then(|number| number.checked_mul(units[place].1));
        match part.and_then(|part| total.checked_add(part)).filter(|total| *total <= DAYS_MAX * UNITS[0].1) {
            Some(sum) => total = sum,
            None => return wrong(&format!("is longer than {DAYS_MAX}d")),
        }
        units = &units[place + 1..];
        rest = &rest[digits + letters..];
    }
    Ok(Duration::from_millis(total))
}

/// Reads a span that a process may wait for the store's lock.
pub(crate) fn busy_wait(text: &str) -> Result<Duration, String> {
    let wait = duration(text)?;
    if wait <= BUSY_WAIT_MAX {
        Ok(wait)
    } else {
        Err(format!("the busy wait {:?} is longer than 1d; write it as 5s, or at most 1d", shown(text)))
    }
}

/// So many messages in a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    pub(crate) messages: u32,
    pub(crate) period: Duration,
}

/// Reads a rate, such as `100/1m`.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    let shown = shown(text);
    let wrong = |problem: &str| format!("the rate {shown:?} {problem}; write it as 100/1m or 5/250ms");
    let (messages, period) = text.split_once('/').ok_or_else(|| wrong("has no / in it"))?;
    if messages.is_empty() || !messages.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong("does not begin with a number of messages"));
    }
    let messages = messages.parse().map_err(|_| wrong(&format!("is of more than {} messages", u32::MAX)))?;
    Ok(Rate { messages, period: duration(period)? })
}

/// Reads a backoff: a span that stays the same, such as `30s`, or the first and the longest, such as `1s..1h`.
pub(crate) fn retry(text: &str) -> Result<Retry, String> {
    let Some((first, longest)) = text.split_once("..") else { return Ok(Retry::fixed(duration(text)?)) };
    let (first, longest) = (duration(first)?, duration(longest)?);
    if first > longest {
        let shown = shown(text);
        return Err(format!("the backoff {shown:?} ends below its beginning; write it as 30s, or 1s..1h"));
    }
    Ok(Retry::exponential(first, longest))
}

/// Reads an instant.
pub(crate) fn instant(text: &str) -> Result<SystemTime, String> {
    let problem = match text.parse::<Timestamp>() {
        Ok(stamp) => match at_ms(stamp.as_millisecond()) {
            Some(at) => return Ok(at),
            None => "is later than this system can tell",
        },
        Err(_) => why_no_instant(text),
    };
    let (shown, last) = (shown(text), Timestamp::MAX.strftime("%Y-%m-%dT%H:%M:%SZ"));
    Err(format!(
        "the instant {shown:?} {problem}; write it as 2030-01-31T08:00:00Z or 2030-01-31T08:00:00+02:00, up to {last}"
    ))
}

/// What is wrong with a text that is no instant, in our own words.
fn why_no_instant(text: &str) -> &'static str {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (date, time) = text.split_once(['T', 't', ' ']).map_or((text, None), |(date, time)| (date, Some(time)));
    let mut parts = date.trim_start_matches('+').splitn(3, '-');
    let (year, month, day) = (parts.next(), parts.next(), parts.next());
    let is_date = [year, month, day].into_iter().all(|part| part.is_some_and(digits));
    let year = year.filter(|_| is_date).unwrap_or_default().trim_start_matches('0');
    match time {
        _ if text.is_empty() => "is empty",
        _ if !is_date => "is no date and time",
        _ if year.len() > 4 => "is beyond the year 9999",
        None => "has no time of day",
        Some(time) if !time.contains(['Z', 'z', '+', '-']) => "has no offset from UTC (Z, or +02:00)",
        Some(_) if year == "9999" => "is beyond the last one, or there is none of that date, time or offset",
        Some(_) => "is none: there is no such date, time or offset",
    }
}

/// As much of a text as is told.
fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}

/// A span in the form that [`duration`] reads, in its two largest units.
pub(crate) fn span(span: Duration) -> String {
    let mut left = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    let mut parts = 0;
    for (name, size) in UNITS {
        if left >= size && parts < 2 {
            text.push_str(&format!("{}{name}", left / size));
            left %= size;
            parts += 1;
        } else if parts > 0 {
            break; // 1d 20s is 1d: the second unit is the one that follows the first.
        }
    }
    if text.is_empty() { "0s".into() } else { text }
}

/// An instant in unix ms, in RFC 3339 and UTC.
pub(crate) fn stamp(unix_ms: i64) -> String {
    Timestamp::from_millisecond(unix_ms).map_or_else(|_| unix_ms.to_string(), |stamp| stamp.to_string())
}

/// An instant in unix ms, and how far away it is.
pub(crate) fn stamp_and_distance(unix_ms: i64) -> String {
    let ms = unix_ms.saturating_sub(now_ms());
    let distance = span(Duration::from_millis(ms.unsigned_abs()));
    match ms {
        1.. => format!("{} (in {distance})", stamp(unix_ms)),
        _ => format!("{} ({distance} ago)", stamp(unix_ms)),
    }
}

/// The instant of this many unix ms; before 1970 counts as 1970. `None` where the platform has no such instant.
pub(crate) fn at_ms(unix_ms: i64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(unix_ms).unwrap_or(0)))
}

/// The wall clock, in unix ms.
#[allow(clippy::disallowed_methods, reason = "this is the one place of the program that reads the wall clock")]
pub(crate) fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| i64::try_from(now.as_millis()).unwrap_or(i64::MAX))
}

/// A stopwatch on the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    #[allow(clippy::disallowed_methods, reason = "this is the one place of the program that reads the monotonic clock")]
    pub(crate) fn start() -> Stopwatch {
        Stopwatch(Instant::now())
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    /// What is left of `limit`; `None` when it is over.
    pub(crate) fn left(self, limit: Duration) -> Option<Duration> {
        limit.checked_sub(self.elapsed()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_in_every_unit() {
        for (text, ms) in [
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("250ms", 250),
            ("2d", 172_800_000),
            ("1d2h3m4s5ms", 93_784_005),
            ("0s", 0),
            ("007s", 7_000),
            ("36525d", 36_525 * 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn what_is_no_span_is_refused_by_name() {
        for text in [
            "",
            " ",
            "5",
            "s",
            "-5s",
            "+5s",
            "5 s",
            "5s ",
            "1.5h",
            "5x",
            "5S",
            "1m1h",
            "1s1s",
            "5sm",
            "é",
            "5é",
            "1h\0",
            "99999999999999999999s",
            "18446744073709551615d",
            "36525d1ms",
            "infinite",
            "NaN",
            "5mss",
            "٣s",
        ] {
            let error = duration(text).unwrap_err();
            assert!(error.contains(&format!("{text:?}")) && error.contains("1h30m"), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_rate_has_a_number_and_a_span() {
        assert_eq!(rate("100/1m"), Ok(Rate { messages: 100, period: Duration::from_secs(60) }));
        for text in
            ["", "100", "/", "100/", "/1m", "-1/1m", "1.5/1m", "1/1", "100/m", "4294967296/1m", "1/1m/1m", "+1/1m"]
        {
            assert!(rate(text).is_err(), "{text}");
        }
        assert!(rate("fast").unwrap_err().contains("\"fast\" has no / in it; write it as 100/1m"));
    }

    #[test]
    fn a_backoff_is_one_span_or_two() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3_600));
        assert_eq!(retry("1s"), Ok(Retry::fixed(second)));
        assert_eq!(retry("1s..1h"), Ok(Retry::exponential(second, hour)));
        assert_eq!(retry("0s..0s"), Ok(Retry::exponential(Duration::ZERO, Duration::ZERO)));
        for text in ["", "..", "1s..", "..1h", "1h..1s", "1s...1h", "1s..2s..3s", "1s-1h", "x"] {
            assert!(retry(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_span_is_written_as_it_is_read() {
        for (ms, text) in [
            (0, "0s"),
            (1, "1ms"),
            (999, "999ms"),
            (61_000, "1m1s"),
            (3_600_000, "1h"),
            (86_420_000, "1d"),
            (93_784_005, "1d2h"),
        ] {
            assert_eq!(span(Duration::from_millis(ms)), text);
            assert!(duration(text).is_ok());
        }
        assert!(!span(Duration::MAX).is_empty());
    }

    #[test]
    fn instants_carry_an_offset() {
        assert_eq!(instant("1970-01-01T02:00:01+02:00").unwrap(), at_ms(1_000).unwrap());
        for text in ["", "tomorrow", "2030-01-31", "2030-01-31T08:00:00", "2030-13-01T00:00:00Z"] {
            assert!(instant(text).unwrap_err().contains(&format!("{text:?}")), "{text}");
        }
        for ms in [i64::MIN, -1, 0, 1_700_000_000_000, i64::MAX] {
            assert!(!stamp(ms).is_empty() && !stamp_and_distance(ms).is_empty());
        }
    }
}
