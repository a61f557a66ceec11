//! Names that nobody else has, wherever and whenever they are made.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// 64 bits from the system's randomness, by way of the standard library's hash keys. (The generator that makes the jitter is
/// seeded by the time and the thread, which two machines or processes may share.)
pub(crate) fn bits() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// 32 hexadecimal digits.
pub(crate) fn name() -> String {
    format!("{:016x}{:016x}", bits(), bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_names_are_alike() {
        let names: std::collections::HashSet<String> = (0..1000).map(|_| name()).collect();
        assert_eq!(names.len(), 1000);
        assert!(names.iter().all(|name| name.len() == 32));
    }
}
