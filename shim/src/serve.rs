//! Processes file by file, as the worker asks.

use std::{convert::Infallible, path::Path, time::Instant};

use crate::{
    end::End,
    exec,
    host::{Host, Running},
    lines::Lines,
    link::Link,
    program::Program,
    signals::Signals,
    text::beginning,
    wire::{Message, Request},
    workspace::Workspace,
};

/// Serves until the worker is gone.
pub(crate) fn serve(
    program: Result<Program, String>,
    socket: &Path,
    workspace: &Workspace,
    is_lines: bool,
    mut signals: Signals,
) -> Result<Infallible, End> {
    let mut link = Link::connect(socket, &mut signals)?;
    let served = program.map_err(End::Unusable).and_then(|program| {
        let mut host = Host::new(program, is_lines, signals)?;
        let mut lines = if is_lines { Some(Lines::start(&mut host)?) } else { None };
        let served = serve_files(&mut host, &mut link, workspace, &mut lines);
        host.abandon(lines.and_then(Lines::into_running));
        served
    });
    if let Err(End::Unusable(text)) = &served {
        // A worker that is gone does not need to know.
        let _ = link.send(&Message::Unusable(beginning(text).to_owned()));
    }
    served
}

fn serve_files(
    host: &mut Host,
    link: &mut Link,
    workspace: &Workspace,
    lines: &mut Option<Lines>,
) -> Result<Infallible, End> {
    link.send(&Message::Hello)?;
    loop {
        let deadline = wait_for_file(host, link, lines.as_mut().and_then(Lines::running))?;
        let done = match lines {
            Some(lines) => lines.process(host, link, workspace, deadline)?,
            None => exec::process(host, link, workspace, deadline)?,
        };
        link.send(&Message::Done(done))?;
    }
}

/// Waits for the next file, and returns its deadline. A process that is kept may write to its log meanwhile,
/// or die.
fn wait_for_file(
    host: &mut Host,
    link: &mut Link,
    mut kept: Option<&mut Running>,
) -> Result<Option<Instant>, End> {
    loop {
        match link.take() {
            // A timeout beyond the range of the clock means no limit.
            Some(Request::File { timeout }) => {
                return Ok(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
            }
            // It was sent before the worker knew that the file had ended.
            Some(Request::Stop) => continue,
            None => {}
        }
        host.wait(None, kept.as_mut().map(|kept| &mut kept.feed), Some(link))?;
        if let Some(kept) = &mut kept {
            host.reap(kept);
        }
    }
}
