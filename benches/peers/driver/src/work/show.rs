//! What the contender's connections are set to, asked after an enqueue and a claim.

use crate::contender::{Answer, Contender};
use crate::folder::Folder;
use crate::payload::{SMALL, payload};
use crate::rows::write_settings;

pub fn show(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    {
        let mut handle = peer.handle()?;
        handle.enqueue(&payload(SMALL))?;
        if !contender.crew && contender.lack("W2").is_none() && handle.claim(&mut |_| {})? {
            handle.ack()?;
        }
        let (version, settings) = (contender.settings)(folder.path(), &*peer);
        write_settings(contender, &version, &settings);
    }
    Ok(())
}
