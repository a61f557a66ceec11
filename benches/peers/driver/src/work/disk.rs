//! What the disk itself does: appends and overwrites of 4 KiB, each followed by an fdatasync.

use std::fs::File;
use std::io::{Seek, Write};
use std::time::Instant;

use crate::contender::Answer;
use crate::knobs::knobs;
use crate::latencies::Latencies;
use crate::meter::settle_disk;
use crate::rows::Row;

pub fn disk() -> Answer<()> {
    settle_disk();
    let path = knobs().out.join("disk");
    let mut file = File::create(&path).map_err(|error| error.to_string())?;
    let mut appended = 0;
    for what in ["append", "overwrite"] {
        let (began, mut times, mut count) = (Instant::now(), Latencies::default(), 0);
        file.rewind().map_err(|error| error.to_string())?;
        while began.elapsed() < knobs().time {
            if what == "overwrite" && count % appended == 0 {
                file.rewind().map_err(|error| error.to_string())?;
            }
            let before = Instant::now();
            file.write_all(&[7; 4096]).and_then(|()| file.sync_data()).map_err(|error| error.to_string())?;
            times.push(before.elapsed());
            count += 1;
        }
        if what == "append" {
            appended = count;
        }
        Row::disk(what, count as f64 / began.elapsed().as_secs_f64()).latencies(&mut times).write();
    }
    std::fs::remove_file(path).map_err(|error| error.to_string())
}
