//! `enqueue --lines`: every line of stdin is a message.

use relet::{Message, PAYLOAD_MAX};

use crate::args::{self, Form, Global};
use crate::exit::{Failure, Outcome};
use crate::json;
use crate::mark;
use crate::output::Out;
use crate::stream::{Bad, Content, Loader};

pub(crate) fn enqueue(global: &Global, out: &mut Out, args: &args::Enqueue) -> Outcome {
    if args.payload.as_ref().is_some_and(|payload| payload != "-") {
        return Err(Failure::usage("--lines reads stdin; leave PAYLOAD out, or leave --lines out"));
    }
    let mut form = args.lines.unwrap_or(Form::Auto);
    let store = global.create()?;
    // No message at all, so that a queue name which no store accepts is refused before anything is read.
    store.queue(&args.queue).enqueue_all::<Message>([])?;
    Loader::new(&store, out).load(PAYLOAD_MAX, |line| {
        if line.is_empty() {
            return Ok(Content::Nothing);
        }
        // Who says that it is text gets it as it is. (The mark in front of the first line is gone already.)
        if form != Form::Text {
            mark::refuse_wide(&line).map_err(Bad::Stream)?;
        }
        if form == Form::Auto {
            form = if line.starts_with(b"{") { Form::Json } else { Form::Text };
        }
        if form == Form::Json {
            // Several files may have been put one after the other, each with its mark.
            let line = mark::strip(&line);
            if line.trim_ascii().is_empty() {
                return Ok(Content::Nothing);
            }
            check_json(line)?;
            return Ok(Content::One((args.queue.clone(), args.message(line.to_vec()))));
        }
        Ok(Content::One((args.queue.clone(), args.message(line))))
    })
}

fn check_json(line: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(line).map_err(|error| format!("no JSON, since it is no UTF-8 ({error})"))?;
    json::check(text).map_err(|problem| format!("no JSON ({problem}); --lines=text takes every line as it is"))
}
