//! The tail: the last lines of what a command has said on stderr, which become the message's error.

/// Lines that are kept, and bytes of them.
const LINES_MAX: usize = 20;
const BYTES_MAX: usize = 4 << 10;

/// The end of a stream.
#[derive(Debug, Default)]
pub(crate) struct Tail(Vec<u8>);

impl Tail {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(&bytes[bytes.len().saturating_sub(BYTES_MAX)..]);
        if self.0.len() > 4 * BYTES_MAX {
            self.0.drain(..self.0.len() - BYTES_MAX);
        }
    }

    /// The last lines, without the line break at the end; what is no UTF-8 is replaced.
    pub(crate) fn text(&self) -> String {
        let bytes = &self.0[self.0.len().saturating_sub(BYTES_MAX)..];
        let is_cut = bytes.len() < self.0.len();
        // A character that was cut in two is left out.
        let inside = bytes.iter().take(3).take_while(|byte| is_cut && **byte & 0xC0 == 0x80).count();
        let text = String::from_utf8_lossy(&bytes[inside..]);
        let text = text.trim_end();
        let text = &text[text.ceil_char_boundary(text.len().saturating_sub(BYTES_MAX))..];
        let start = text.rmatch_indices('\n').nth(LINES_MAX - 1).map_or(0, |(at, _)| at + 1);
        text[start..].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(bytes: &[u8], at_once: usize) -> String {
        let mut tail = Tail::default();
        bytes.chunks(at_once).for_each(|chunk| tail.push(chunk));
        assert!(tail.0.len() <= 4 * BYTES_MAX);
        tail.text()
    }

    #[test]
    fn the_last_lines_are_kept_and_no_more() {
        let lines: Vec<String> = (1..=100).map(|number| format!("line {number}\n")).collect();
        assert_eq!(tail(lines.concat().as_bytes(), 7), lines[80..].concat().trim_end());
        assert_eq!(tail(b"one\n\n", 1), "one");
        assert_eq!(tail(b"one\ntwo", 100), "one\ntwo");
        assert_eq!(tail(b"", 1), "");
        assert_eq!(tail(b" \n\n", 1), "");
    }

    #[test]
    fn long_lines_are_cut_at_a_character() {
        for (text, unit) in [("é".repeat(50_000), 2), ("𝄞".repeat(50_000), 4), ("x".repeat(50_000), 1)] {
            for shift in ["", "a", "ab", "abc"] {
                for at_once in [1, 1_000, 65_536] {
                    let kept = tail(format!("{text}{shift}").as_bytes(), at_once);
                    assert!(kept.len() <= BYTES_MAX && kept.len() > BYTES_MAX - unit - 3, "{}", kept.len());
                    assert!(!kept.contains('\u{fffd}') && kept.ends_with(shift));
                }
            }
        }
    }

    #[test]
    fn what_is_no_text_is_replaced_and_bounded() {
        assert_eq!(tail(b"a\xffb\n", 1), "a\u{fffd}b");
        let kept = tail(&[0xff; 100_000], 4_096);
        assert!(kept.len() <= BYTES_MAX && kept.chars().all(|c| c == '\u{fffd}'));
    }
}
