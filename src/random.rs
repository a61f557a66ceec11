//! Names that nobody else has, wherever and whenever they are made.

/// 64 bits from the system's randomness. (A generator in the process would give a child that was forked the same as its parent; and
/// one that is seeded by the time and the thread, two machines.)
pub(crate) fn bits() -> u64 {
    getrandom::u64().unwrap_or_else(|_| fastrand::u64(..))
}

/// Digits of a [`name`].
pub(crate) const NAME_LENGTH: usize = 32;

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
        assert!(names.iter().all(|name| name.len() == NAME_LENGTH));
    }
}
