//! The clock of this program: it goes on by a microsecond each time somebody looks.
//!
//! relet does a few things now and then: every 25 ms it looks for dead workers, every second it prunes. How many of these
//! fall among the counted operations would depend on the machine, and under valgrind, where everything takes fifty times as
//! long, they would be most of what is counted. With this clock none of them does.
//!
//! The standard library and C ask libc, and find this function before libc's own. What asks the kernel itself does not come
//! here: the clock of the leases (rustix).

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::sync::atomic::{AtomicI64, Ordering};

/// C's `struct timespec`.
#[repr(C)]
struct TimeSpec {
    seconds: i64,
    nanoseconds: i64,
}

const CLOCK_REALTIME: i32 = 0;
/// The beginning of 2026.
const WALL: i64 = 1_767_225_600;
/// Ahead of every machine's own, so that a wait until an instant of this clock does not end at once.
const MONOTONIC: i64 = 1 << 30;

static LOOKS: AtomicI64 = AtomicI64::new(0);

/// Takes the place of libc's.
///
/// # Safety
/// `at` is null or points to where a `struct timespec` can be written, as C asks for.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: i32, at: *mut TimeSpec) -> i32 {
    let micros = LOOKS.fetch_add(1, Ordering::Relaxed);
    let start = if clock == CLOCK_REALTIME { WALL } else { MONOTONIC };
    let now = TimeSpec { seconds: start + micros / 1_000_000, nanoseconds: micros % 1_000_000 * 1_000 };
    if !at.is_null() {
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { at.write(now) };
    }
    0
}
