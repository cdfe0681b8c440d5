//! Processes one file of a `Lines` filter in a pod of its own: one line, the end of input, the answer as an
//! exit code.

use crate::{
    FAILED, REJECTED, UNUSABLE, end::End, host::Host, program::Program, signals::Signals, spawn::Stdin,
    verdict::Verdict, wire::Ending, workspace::Workspace,
};

/// Processes the file; returns the exit code.
pub(crate) fn run(
    program: Result<Program, String>,
    workspace: &Workspace,
    signals: Signals,
) -> Result<u8, End> {
    let mut host = Host::new(program.map_err(End::Unusable)?, true, signals)?;
    let mut running = host.start(Stdin::Pipe)?;
    running.feed.push(&workspace.file_line(&workspace.source()));
    running.feed.close();
    while running.main.ending.is_none() {
        host.wait(None, Some(&mut running.feed), None)?;
        host.reap(&mut running);
        // As without the shim, the filter decides how to react.
        if host.signals.take_term() {
            running.main.terminate();
        }
    }
    let ended = host.end(running)?;
    // `end` may have added the newline that the last line lacks.
    host.drain()?;
    let verdict = Verdict::of(&host.output.take_answers(), ended);
    let text = verdict.reason.clone().unwrap_or_else(|| host.output.tail.last_lines());
    let code = exit_code(verdict.ending, ended);
    if code != 0 {
        workspace.write_termination_text(&text);
    }
    Ok(code)
}

/// A final refusal outranks everything else. Otherwise the filter's own code counts, as without the shim,
/// unless it is one of those reserved for the shim.
fn exit_code(ending: Ending, ended: Ending) -> u8 {
    let own = match ended {
        Ending::Exited(code) => match u8::try_from(code) {
            Ok(UNUSABLE | REJECTED) | Err(_) => FAILED,
            Ok(code) => code,
        },
        // As shells and the container runtime count.
        Ending::Signaled(signal) => u8::try_from(128 + signal).unwrap_or(FAILED),
        _ => 0,
    };
    match ending {
        Ending::Refused { retry: false } => REJECTED,
        Ending::Accepted => own,
        _ if own != 0 => own,
        _ => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_apart_what_a_retry_may_help() {
        let (well, three, killed) = (Ending::Exited(0), Ending::Exited(3), Ending::Signaled(9));
        for (ending, ended, code) in [
            (Ending::Accepted, well, 0),
            (Ending::Accepted, three, 3),
            (Ending::Accepted, killed, 137),
            (Ending::Refused { retry: true }, well, FAILED),
            (Ending::Refused { retry: true }, three, 3),
            (Ending::Refused { retry: false }, well, REJECTED),
            (Ending::Refused { retry: false }, three, REJECTED),
            (Ending::BadAnswer, well, FAILED),
            (well, well, FAILED),
            (three, three, 3),
            (killed, killed, 137),
            (Ending::Accepted, Ending::Exited(UNUSABLE.into()), FAILED),
            (Ending::Exited(REJECTED.into()), Ending::Exited(REJECTED.into()), FAILED),
        ] {
            assert_eq!(exit_code(ending, ended), code, "{ending}, {ended}");
        }
    }
}
