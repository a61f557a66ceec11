//! A claim at depth: 1 thousand, 100 thousand and 1 million ready messages, and 1 thousand beside 1 million that must
//! wait or are finished. `cargo bench --bench depth`

mod sides;

use std::time::Duration;

use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};

use sides::{Backlog, Depth, time_claims};

const THOUSAND: i64 = 1_000;
const MILLION: i64 = 1_000_000;

fn depth(criterion: &mut Criterion) {
    for more in [0, 99 * THOUSAND, 999 * THOUSAND] {
        one(criterion, &format!("claim at {} ready", more + THOUSAND), Backlog::Ready, more);
    }
    for backlog in [Backlog::Delayed, Backlog::Deferred, Backlog::Done, Backlog::Dead, Backlog::Grouped, Backlog::Gated]
    {
        one(criterion, &format!("claim beside {MILLION} {}", backlog.name()), backlog, MILLION);
    }
}

fn one(criterion: &mut Criterion, name: &str, backlog: Backlog, count: i64) {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(20)
        .sampling_mode(SamplingMode::Flat)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    let mut depth = None;
    let mut open = || Depth::new(THOUSAND, backlog, count);
    group.bench_function("relet", |bencher| {
        let depth = depth.get_or_insert_with(&mut open);
        bencher.iter_custom(|count| time_claims(&depth.relet, count));
    });
    group.bench_function("raw", |bencher| {
        let depth = depth.get_or_insert_with(&mut open);
        bencher.iter_custom(|count| time_claims(&depth.raw, count));
    });
    group.finish();
}

criterion_group!(benches, depth);
criterion_main!(benches);
