//! Cron patterns: the instants at which a pattern ticks in a time zone.
//!
//! croner reads the pattern and searches the wall clock's face for it, without a time zone. The time zone is applied here,
//! one span between two changes of its offset after the other. croner could do that, too, but it runs a tick of the skipped
//! hour, and keeps one of the doubled hour from running twice, only where the pattern has a single hour, minute and second:
//! "30 2,14 * * *" would lose the one and double the other. And it would bring a jiff of its own, an older one.

use std::cmp::Ordering;

use croner::errors::CronError;
use croner::parser::{CronParser, Year};
use croner::{CivilDate, CivilDateTime, CivilTime, CronDateTime, Resolution, Weekday};
use jiff::civil::DateTime;
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use crate::error::{Error, Result};

const SECOND: SignedDuration = SignedDuration::from_secs(1);

/// A pattern in a time zone.
#[derive(Debug, Clone)]
pub(crate) struct Cron {
    text: String,
    pattern: croner::Cron,
    time_zone: TimeZone,
    /// It names no hours. Such a pattern goes by the clock's face alone: what the skipped hour would have shown does not come,
    /// and what the doubled hour shows comes twice. One that names hours comes once for each.
    every_hour: bool,
}

/// A span of time with one offset from UTC.
struct Span {
    start: Timestamp,
    /// The first instant behind it.
    end: Timestamp,
    offset: Offset,
    /// The offset of the span before it.
    before: Offset,
}

impl Cron {
    pub(crate) fn parse(pattern: &str, time_zone: &str) -> Result<Cron> {
        let unusable = |problem: String| Error::CronPattern { pattern: pattern.into(), problem };
        // A year would make a pattern that ends.
        let parser = CronParser::builder().year(Year::Disallowed).build();
        let parsed = parser.parse(pattern).map_err(|error| unusable(problem(&error)))?;
        // croner reads "," as no value, and then searches three thousand years for it, second by second.
        let of = &parsed.pattern;
        if [&of.seconds, &of.minutes, &of.hours, &of.months].into_iter().any(|field| field.values().is_empty()) {
            return Err(unusable("a field has no value".into()));
        }
        let time_zone = TimeZone::get(time_zone).map_err(|_| Error::TimeZone { name: time_zone.into() })?;
        let every_hour = parsed.pattern.hours.values().len() == 24;
        Ok(Cron { text: pattern.into(), pattern: parsed, time_zone, every_hour })
    }

    /// The first tick after this instant. Instants are in unix ms, ticks on whole seconds.
    pub(crate) fn next(&self, after: i64) -> Result<i64> {
        self.search(after)
            .ok_or_else(|| Error::CronPattern { pattern: self.text.clone(), problem: "it never comes".into() })
    }

    fn search(&self, after: i64) -> Option<i64> {
        let mut at = second_of(after)?.checked_add(SECOND).ok()?;
        loop {
            let span = self.span(at);
            let first = self.first(&span);
            let from = if at == span.start { first } else { first.max(span.offset.to_datetime(at)) };
            let found = self.pattern.find_next_occurrence(&Face(from), true).ok()?.0;
            if found < span.offset.to_datetime(span.end) {
                return span.instant(found);
            }
            if span.end == Timestamp::MAX {
                return None;
            }
            at = span.end;
        }
    }

    /// The last tick up to this instant, which may be this instant itself.
    pub(crate) fn latest(&self, at: i64) -> Option<i64> {
        let mut at = second_of(at)?;
        loop {
            let span = self.span(at);
            let found = self.pattern.find_previous_occurrence(&Face(span.offset.to_datetime(at)), true).ok()?.0;
            if found >= self.first(&span) {
                return span.instant(found);
            }
            at = span.start.checked_sub(SECOND).ok()?;
        }
    }

    fn span(&self, at: Timestamp) -> Span {
        let start = at.checked_add(SECOND).ok().and_then(|behind| self.time_zone.preceding(behind).next());
        let start = start.map_or(Timestamp::MIN, |change| change.timestamp());
        let end = self.time_zone.following(at).next().map_or(Timestamp::MAX, |change| change.timestamp());
        let offset = self.time_zone.to_offset(at);
        let before = start.checked_sub(SECOND).map_or(offset, |before| self.time_zone.to_offset(before));
        Span { start, end, offset, before }
    }

    /// The first time on the clock's face that belongs to this span. Where hours are named the face is cut where the span
    /// before ends: what was skipped belongs to this span, and is due at its start; what is shown again does not.
    fn first(&self, span: &Span) -> DateTime {
        if self.every_hour { span.offset } else { span.before }.to_datetime(span.start)
    }
}

impl Span {
    /// When the clock shows this time in this span, in unix ms; the span's start where it was skipped.
    fn instant(&self, face: DateTime) -> Option<i64> {
        let instant = self.offset.to_timestamp(face).ok()?;
        Some(instant.max(self.start).as_millisecond())
    }
}

fn second_of(ms: i64) -> Option<Timestamp> {
    Timestamp::from_second(ms.div_euclid(1000)).ok()
}

/// In words of our own where croner's are about years, which are not to be had here.
fn problem(error: &CronError) -> String {
    let text = match error {
        CronError::InvalidPattern(_) => "it needs 5 fields, or 6 with the seconds first, or a name such as @daily",
        CronError::IllegalCharacters(text) | CronError::ComponentError(text) => text,
        other => return other.to_string(),
    };
    text.trim_start_matches("CronPattern contains ").trim_end_matches('.').into()
}

/// What a clock on the wall shows, for croner to search.
#[derive(Clone)]
struct Face(DateTime);

impl CronDateTime for Face {
    fn to_civil(&self) -> CivilDateTime {
        let at = self.0;
        CivilDateTime::new(
            CivilDate::from_parts_unchecked(at.year().into(), at.month() as u32, at.day() as u32),
            CivilTime::from_parts_unchecked(at.hour() as u32, at.minute() as u32, at.second() as u32),
        )
    }

    fn civil_weekday(&self) -> Weekday {
        Weekday::from_days_from_sunday(self.0.weekday().to_sunday_zero_offset() as u32)
    }

    fn resolve_civil(&self, civil: CivilDateTime) -> Result<Resolution<Face>, CronError> {
        let year = i16::try_from(civil.year()).map_err(|_| CronError::InvalidDate)?;
        let (month, day) = (civil.month() as i8, civil.day() as i8);
        let (hour, minute, second) = (civil.hour() as i8, civil.minute() as i8, civil.second() as i8);
        let at = DateTime::new(year, month, day, hour, minute, second, 0).map_err(|_| CronError::InvalidDate)?;
        Ok(Resolution::Single(Face(at)))
    }

    fn checked_add_seconds(&self, seconds: i64) -> Option<Face> {
        self.0.checked_add(SignedDuration::from_secs(seconds)).ok().map(Face)
    }

    fn cmp_instant(&self, other: &Face) -> Ordering {
        self.0.cmp(&other.0)
    }
}
