//! What the first bytes of a text say of its encoding. Every reader of lines asks it.

/// The mark that some programs put in front of UTF-8. It is no part of the text.
pub(crate) const UTF8: &[u8] = b"\xef\xbb\xbf";

/// The text without such a mark.
pub(crate) fn strip(text: &[u8]) -> &[u8] {
    text.strip_prefix(UTF8).unwrap_or(text)
}

/// Refuses the first line of a text, or any line of JSON, that is in an encoding of which nothing here can be read. (A line of
/// JSON has no NUL at its beginning, and no text in UTF-8 begins with these marks.)
pub(crate) fn refuse_wide(line: &[u8]) -> Result<(), String> {
    let wide = match line {
        [0, 0, 0xfe, 0xff, ..] | [0xff, 0xfe, 0, 0, ..] | [0, 0, 0, b'{', ..] | [b'{', 0, 0, 0, ..] => "UTF-32",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [0, b'{', ..] | [b'{', 0, ..] => "UTF-16",
        _ => return Ok(()),
    };
    Err(format!(
        "it is {wide}, and only UTF-8 can be read; write it as that, with `iconv -f {wide} -t UTF-8` or, in PowerShell, \
         `Out-File -Encoding utf8`"
    ))
}
