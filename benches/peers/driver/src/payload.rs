//! Payloads: text, since some peers store JSON. A stamped one begins with the instant at which it was made.

pub const SMALL: usize = 256;

const STAMP: usize = 20;

pub fn payload(bytes: usize) -> Vec<u8> {
    (b'a'..=b'z').cycle().take(bytes).collect()
}

/// The payloads of a mixed load: of a hundred, ninety small ones, nine of 4 KiB and one of 64 KiB.
pub fn mixed(index: usize) -> usize {
    match index * 37 % 100 {
        0 => 64 * 1024,
        1..=9 => 4 * 1024,
        _ => SMALL,
    }
}

/// Reads a message that was claimed, as far as the compiler can tell.
pub fn look(payload: &[u8]) {
    std::hint::black_box(payload);
}

pub fn stamped(bytes: usize) -> Vec<u8> {
    let mut text = payload(bytes);
    text[..STAMP].copy_from_slice(format!("{:020}", nanos()).as_bytes());
    text
}

/// How long ago the payload was stamped; none where it was not. Some peers wrap it in quotes.
pub fn age(payload: &[u8]) -> Option<u64> {
    let start = payload.iter().take(64).position(u8::is_ascii_digit)?;
    let digits = payload.get(start..start + STAMP)?;
    let then: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(nanos().saturating_sub(then))
}

/// A clock that all processes of the machine share.
pub fn nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
