//! What the counting bench counts, and how: see benches/cost.rs.

mod clock;
pub mod heap;
pub mod log;
pub mod tools;
pub mod work;
