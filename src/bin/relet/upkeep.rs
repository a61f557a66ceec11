//! Prune, backup and restore, and what is printed for shells and manuals.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::{Cli, Global};
use crate::exit::{Exit, Failure, Outcome};
use crate::json::Object;
use crate::output::{Out, count};

pub(crate) fn prune(global: &Global, out: &mut Out) -> Outcome {
    let changed = global.existing()?.prune()?;
    match out.json {
        true => out.object(Object::new().put("pruned", changed))?,
        false => out.line(format_args!("{} deleted or expired", count(changed, "message")))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn backup(global: &Global, out: &mut Out, target: &Path) -> Outcome {
    global.look()?.backup(target)?;
    let target = target.display().to_string();
    match out.json {
        true => out.object(Object::new().put("backup", target))?,
        false => out.line(target)?,
    }
    Ok(Exit::Done)
}

pub(crate) fn restore(global: &Global, out: &mut Out, source: &Path) -> Outcome {
    let target = global.file()?;
    global.options().restore(source, target)?;
    let target = target.display().to_string();
    match out.json {
        true => out.object(Object::new().put("restored", target))?,
        false => out.line(target)?,
    }
    Ok(Exit::Done)
}

pub(crate) fn completions(out: &mut Out, shell: Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "relet", &mut script);
    out.bytes(&script)?;
    Ok(Exit::Done)
}

/// One page for the whole program: the sections that a page has, then a section for each command.
pub(crate) fn man(out: &mut Out) -> Outcome {
    let page = man_page().map_err(|error| Failure::failed(format!("the page cannot be written: {error}")))?;
    out.bytes(&page)?;
    Ok(Exit::Done)
}

fn man_page() -> io::Result<Vec<u8>> {
    let mut command = Cli::command();
    command.build();
    let mut page = Vec::new();
    let main = Man::new(command.clone()).manual("relet");
    main.render_title(&mut page)?;
    main.render_name_section(&mut page)?;
    main.render_synopsis_section(&mut page)?;
    main.render_description_section(&mut page)?;
    main.render_options_section(&mut page)?;
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        section(&mut page, subcommand)?;
        for inner in subcommand.get_subcommands().filter(|inner| inner.get_name() != "help") {
            section(&mut page, inner)?;
        }
    }
    main.render_extra_section(&mut page)?;
    main.render_version_section(&mut page)?;
    Ok(page)
}

/// A command as a section: what would be its own page, one level lower and without the options that all have.
fn section(page: &mut Vec<u8>, command: &clap::Command) -> io::Result<()> {
    let title = command.get_bin_name().unwrap_or(command.get_name()).to_uppercase();
    let mut own = command.clone();
    for arg in command.get_arguments().filter(|arg| arg.is_global_set() || arg.get_id() == "help") {
        own = own.mut_arg(arg.get_id(), |arg| arg.hide(true));
    }
    let man = Man::new(own);
    let mut body = Vec::new();
    man.render_synopsis_section(&mut body)?;
    man.render_description_section(&mut body)?;
    man.render_options_section(&mut body)?;
    let body = String::from_utf8_lossy(&body).replace("\n.SH ", "\n.SS ");
    page.extend_from_slice(format!(".SH \"{title}\"\n").as_bytes());
    page.extend_from_slice(body.strip_prefix(".SH ").map_or(body.clone(), |body| format!(".SS {body}")).as_bytes());
    Ok(())
}
