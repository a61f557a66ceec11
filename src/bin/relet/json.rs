//! JSON lines: objects whose members keep their order, and the forms that a payload takes in them.

use serde::Serialize;
use serde_json::Value;

/// An object that is being written, on one line.
#[derive(Debug)]
pub(crate) struct Object(String);

impl Object {
    pub(crate) fn new() -> Object {
        Object("{".into())
    }

    /// Adds a member.
    pub(crate) fn put(self, name: &str, value: impl Serialize) -> Object {
        let value = serde_json::to_string(&value).expect("numbers, texts and lists of them are always JSON");
        self.member(name, &value)
    }

    /// Adds the payload: `payload` as it is where it is JSON, else as a string; `payload_base64` where it is no text.
    pub(crate) fn payload(self, bytes: &[u8]) -> Object {
        match std::str::from_utf8(bytes) {
            // Line breaks can only stand between the parts of valid JSON, never inside of a string.
            Ok(text) if check(text).is_ok() => self.member("payload", &text.replace(['\n', '\r'], " ")),
            _ => self.payload_exact(bytes),
        }
    }

    /// Adds the payload so that every byte of it can be had back: `payload` is always a string here.
    pub(crate) fn payload_exact(self, bytes: &[u8]) -> Object {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.put("payload", text),
            Err(_) => self.put("payload_base64", encode_base64(bytes)),
        }
    }

    /// The finished object.
    pub(crate) fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }

    fn member(mut self, name: &str, json: &str) -> Object {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push_str(&serde_json::to_string(name).expect("a text is always JSON"));
        self.0.push(':');
        self.0.push_str(json);
        self
    }
}

/// Refuses what is not JSON, with what is wrong and where.
///
/// Also what hardly any reader of JSON accepts: nesting deeper than 128, numbers beyond a double, halves of surrogate pairs.
pub(crate) fn check(text: &str) -> Result<(), String> {
    serde_json::from_str::<Value>(text).map(drop).map_err(|error| problem(&error))
}

/// What serde_json says of a single line, without its own line number.
pub(crate) fn problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => format!("{} at column {}", &text[..end], error.column()),
        None => text,
    }
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 with padding (RFC 4648, section 4).
pub(crate) fn encode_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = (0..3).fold(0_u32, |group, i| group << 8 | u32::from(chunk.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = BASE64[(group >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= chunk.len() { digit as char } else { '=' });
        }
    }
    text
}

/// The bytes that [`encode_base64`] wrote; `None` for what it never writes.
pub(crate) fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for chunk in digits.as_bytes().chunks(4) {
        let mut group = 0_u32;
        for i in 0..4 {
            let digit = match chunk.get(i) {
                Some(byte) => BASE64.iter().position(|known| known == byte)?,
                None => 0,
            };
            group = group << 6 | digit as u32;
        }
        let whole = chunk.len() * 6 / 8;
        bytes.extend_from_slice(&group.to_be_bytes()[1..=whole]);
    }
    // Wrong padding, and bits that a last digit has too many.
    (encode_base64(&bytes) == text).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_their_order_and_a_line_is_a_line() {
        let object =
            Object::new().put("z", 1).put("a", "x\ny").put("m", None::<i64>).payload(b"{\r\n \"b\": 1,\n\"a\": 2}");
        assert_eq!(object.end(), "{\"z\":1,\"a\":\"x\\ny\",\"m\":null,\"payload\":{   \"b\": 1, \"a\": 2}}");
    }

    #[test]
    fn a_payload_is_json_or_text_or_base64() {
        for (bytes, member) in [
            (b"{\"a\":1}".as_slice(), "\"payload\":{\"a\":1}"),
            (b"12345678901234567890123", "\"payload\":12345678901234567890123"),
            (b"hello", "\"payload\":\"hello\""),
            (b"", "\"payload\":\"\""),
            (b"1e999", "\"payload\":\"1e999\""),
            (b"\"\\ud800\"", "\"payload\":\"\\\"\\\\ud800\\\"\""),
            (b"\xff\x00", "\"payload_base64\":\"/wA=\""),
        ] {
            let text = Object::new().payload(bytes).end();
            assert_eq!(text, format!("{{{member}}}"));
            assert!(check(&text).is_ok());
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert!(Object::new().payload(deep.as_bytes()).end().starts_with("{\"payload\":\"[["));
    }

    #[test]
    fn base64_reads_back_what_it_wrote_and_nothing_else() {
        assert_eq!(encode_base64(b"any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw==");
        for length in 0..70_u8 {
            let bytes: Vec<u8> = (0..length).map(|i| i.wrapping_mul(83)).collect();
            assert_eq!(decode_base64(&encode_base64(&bytes)), Some(bytes));
        }
        for text in ["a", "ab", "abc", "a===", "====", "ab=c", "ab==", "ab c", "äbc", "abcd\n"] {
            assert_eq!(decode_base64(text), None, "{text}");
        }
    }
}
