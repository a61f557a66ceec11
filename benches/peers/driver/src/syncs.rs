//! Calls of `fsync` and `fdatasync`, counted exactly.
//!
//! The two functions below take the place of libc's for everything that is linked into this program. A server is counted
//! by `sync.c`, which is preloaded into it and counts in a file.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fsync(file: i32) -> i32 {
    COUNT.fetch_add(1, Relaxed);
    // SAFETY: the call takes a number and no pointer.
    unsafe { libc::syscall(libc::SYS_fsync, file) as i32 }
}

/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdatasync(file: i32) -> i32 {
    COUNT.fetch_add(1, Relaxed);
    // SAFETY: the call takes a number and no pointer.
    unsafe { libc::syscall(libc::SYS_fdatasync, file) as i32 }
}

/// Of this process and of the server that counts in `SYNC_FILE`.
pub fn syncs() -> u64 {
    COUNT.load(Relaxed) + elsewhere().unwrap_or(0)
}

fn elsewhere() -> Option<u64> {
    let file = PathBuf::from(std::env::var_os("SYNC_FILE")?);
    Some(u64::from_le_bytes(fs::read(file).ok()?.get(..8)?.try_into().ok()?))
}
