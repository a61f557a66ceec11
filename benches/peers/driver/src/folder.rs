//! A folder of its own for each measurement, on the disk of the run, gone afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::Duration;

use crate::contender::{Answer, Contender};
use crate::knobs::knobs;
use crate::meter::settle_disk;

/// From how many messages on a filled file is kept and copied.
const WORTH_KEEPING: usize = 50_000;

/// Pools of connections close in the background.
const CLOSING: Duration = Duration::from_millis(300);

pub struct Folder(PathBuf);

impl Folder {
    pub fn fresh(contender: &Contender) -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("{}-{}-{}", plain(contender.peer), std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = knobs().out.join("data").join(name);
        make(&path);
        Folder(path.canonicalize().expect("a folder that was just made"))
    }

    /// With the messages that `fill` lays out; it closes what it opens. Deep ones are copied from a template.
    pub fn filled(
        contender: &Contender,
        what: &str,
        count: usize,
        fill: impl FnOnce(&Path) -> Answer<()>,
    ) -> Answer<Folder> {
        let folder = Folder::fresh(contender);
        if count < WORTH_KEEPING {
            fill(&folder.0)?;
            sleep(CLOSING);
            return Ok(folder);
        }
        // A file keeps the journal mode that it was made with.
        let journal = if contender.setting.contains("DELETE") { "-delete" } else { "" };
        let template = knobs().templates.join(format!("{}{journal}-{what}-{count}", plain(contender.peer)));
        if !template.exists() {
            let part = template.with_extension("part");
            make(&part);
            fill(&part.canonicalize().map_err(|error| error.to_string())?)?;
            sleep(CLOSING);
            fs::rename(&part, &template).map_err(|error| error.to_string())?;
        }
        let copied = Command::new("cp").arg("-a").arg(template.join(".")).arg(&folder.0).status();
        if !copied.is_ok_and(|status| status.success()) {
            return Err("the template cannot be copied".into());
        }
        for file in fs::read_dir(&folder.0).into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().ends_with("-shm") {
                let _ = fs::remove_file(file.path());
            }
        }
        settle_disk();
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn make(path: &Path) {
    let _ = fs::remove_dir_all(path);
    fs::create_dir_all(path).expect("a folder of the run can be made");
}

fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// The bytes of all files below a folder whose names pass.
pub fn bytes_in(folder: &Path, wanted: &dyn Fn(&str) -> bool) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_dir() {
            sum += bytes_in(&entry.path(), wanted);
        } else if wanted(&entry.file_name().to_string_lossy()) {
            sum += meta.len();
        }
    }
    sum
}
