//! Messages a second, one by one and in batches, on 1, 4 and 16 threads, at both durabilities: relet, raw and bare.
//!
//! `cargo bench --bench throughput`; for ratios measured side by side, `cargo bench --bench ratios`.

mod sides;

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use relet::{Durability, Store};

use sides::bare::Bare;
use sides::raw::Raw;
use sides::{Folder, Relet, Side, Work};

fn throughput(criterion: &mut Criterion) {
    for (durability, name) in [(Durability::Full, "full"), (Durability::Normal, "normal")] {
        for work in [Work::Enqueue, Work::Turn, Work::EnqueueBatch, Work::TurnBatch] {
            for threads in if work.size() == 1 { &[1, 4, 16][..] } else { &[1][..] } {
                let mut group = criterion.benchmark_group(format!("{} {name} x{threads}", work.name()));
                group
                    .sample_size(10)
                    .sampling_mode(SamplingMode::Flat)
                    .warm_up_time(Duration::from_millis(500))
                    .measurement_time(Duration::from_secs(2))
                    .throughput(Throughput::Elements(work.size()));
                let folder = Folder::new();
                let file = |name: &str| folder.file(name);
                let options = Store::options().durability(durability);
                one(&mut group, "relet", work, *threads, || Relet::open(&file("relet.db"), options.clone()));
                one(&mut group, "raw", work, *threads, || Raw::open(&file("raw.db"), durability));
                one(&mut group, "bare", work, *threads, || Bare::open(&file("bare.db"), durability));
                group.finish();
            }
        }
    }
}

fn one<S: Side>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, work: Work, threads: u64, open: impl Fn() -> S) {
    let mut side = None;
    group.bench_function(name, |bencher| {
        // Opened here, so that what is filtered out costs nothing.
        let side = side.get_or_insert_with(&open);
        bencher.iter_custom(|count| work.time(side, threads, count));
    });
}

criterion_group!(benches, throughput);
criterion_main!(benches);
