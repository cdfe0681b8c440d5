//! The protocol `Exec`: the command runs once per file.

use std::time::Instant;

use crate::{end::End, host::Host, link::Link, spawn::Stdin, wire::Done, workspace::Workspace};

/// Runs the command for the current file.
pub(crate) fn process(
    host: &mut Host,
    link: &mut Link,
    workspace: &Workspace,
    deadline: Option<Instant>,
) -> Result<Done, End> {
    let before = host.meter.read(None);
    host.output.begin(&workspace.source());
    let mut running = host.start(Stdin::Empty)?;
    let asked = match host.attend(&mut running, link, deadline) {
        Ok(asked) => asked,
        Err(end) => {
            host.abandon(Some(running));
            return Err(end);
        }
    };
    let ended = host.end(running)?;
    let ending = asked.unwrap_or(ended);
    host.mark_end(ending)?;
    workspace.share_results();
    Ok(host.done(ending, &before, None, workspace.take_termination_text()))
}
