//! The protocol `Lines`: the command is started once and answers file by file.
//!
//! A process that dies, answers garbage, answers twice or has to be ended is replaced, at first at once and
//! then with increasing delays. Its child processes are left alone as long as it lives: a model may have
//! helpers.

use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::{
    end::End,
    host::{Host, Running},
    link::Link,
    spawn::Stdin,
    text::beginning,
    verdict::Verdict,
    wire::{Done, Ending},
    workspace::Workspace,
};

/// The longest delay: a process that cannot work fails its files, but must not keep the node busy.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
const BACKOFF_MIN: Duration = Duration::from_millis(100);

/// The filter's process, if it lives, and the delay before it is started again.
#[derive(Default)]
pub(crate) struct Lines {
    running: Option<Running>,
    backoff: Duration,
    start_at: Option<Instant>,
}

impl Lines {
    /// Starts the process before the first file: loading may take long, and a failed exec concerns no file.
    pub(crate) fn start(host: &mut Host) -> Result<Self, End> {
        Ok(Self { running: Some(host.start(Stdin::Pipe)?), ..Self::default() })
    }

    /// The process that lives between files.
    pub(crate) fn running(&mut self) -> Option<&mut Running> {
        self.running.as_mut()
    }

    pub(crate) fn into_running(self) -> Option<Running> {
        self.running
    }

    /// Processes the current file.
    pub(crate) fn process(
        &mut self,
        host: &mut Host,
        link: &mut Link,
        workspace: &Workspace,
        deadline: Option<Instant>,
    ) -> Result<Done, End> {
        self.retire_unusable(host)?;
        let before = host.meter.read(self.pid());
        let source = workspace.source();
        host.output.begin(&source);
        let Verdict { ending, reason } = self.judge(host, link, &workspace.file_line(&source), deadline)?;
        self.learn(ending);
        host.mark_end(ending)?;
        workspace.share_results();
        let reason = reason.map(|reason| beginning(&reason).to_owned());
        let text = workspace.take_termination_text().or(reason);
        Ok(host.done(ending, &before, self.pid(), text))
    }

    /// Ends a process that died or wrote an answer while it had no file: its next answer could belong to the
    /// last one.
    fn retire_unusable(&mut self, host: &mut Host) -> Result<(), End> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        host.catch_up(&mut running)?;
        let answers = host.output.take_answers();
        if running.main.ending.is_none() && answers.is_empty() {
            self.running = Some(running);
            return Ok(());
        }
        let ended = host.end(running)?;
        self.learn_between_files(if answers.is_empty() { ended } else { Ending::BadAnswer });
        Ok(())
    }

    /// Sends the line to the process, and waits for its answer.
    fn judge(
        &mut self,
        host: &mut Host,
        link: &mut Link,
        line: &str,
        deadline: Option<Instant>,
    ) -> Result<Verdict, End> {
        loop {
            let (mut running, is_fresh) = match self.running.take() {
                Some(running) => (running, false),
                None => match self.wait_for_backoff(host, link, deadline)? {
                    Some(ending) => return Ok(ending.into()),
                    None => (host.start(Stdin::Pipe)?, true),
                },
            };
            running.feed.push(line);
            let asked = match host.attend(&mut running, link, deadline) {
                Ok(asked) => asked,
                Err(end) => {
                    host.abandon(Some(running));
                    return Err(end);
                }
            };
            // A second answer usually comes with the first.
            host.catch_up(&mut running)?;
            let mut answers = host.output.take_answers();
            if asked.is_none() && running.main.ending.is_none() && matches!(answers[..], [Some(_)]) {
                self.running = Some(running);
                return Ok(Verdict::of(&answers, Ending::BadAnswer));
            }
            let is_unread = running.feed.is_unread();
            let ended = host.end(running)?;
            answers.extend(host.output.take_answers());
            if asked.is_none() && answers.is_empty() && is_unread && !is_fresh {
                // It ended because of an earlier file, or of none.
                self.learn_between_files(ended);
                // The file and its log continue with another process.
                host.output.release();
                continue;
            }
            return Ok(asked.map_or_else(|| Verdict::of(&answers, ended), Verdict::from));
        }
    }

    /// Waits until the process may be started. Returns how the file ends, if that happens first.
    fn wait_for_backoff(
        &self,
        host: &mut Host,
        link: &mut Link,
        deadline: Option<Instant>,
    ) -> Result<Option<Ending>, End> {
        while let Some(start_at) = self.start_at.filter(|start_at| *start_at > Instant::now()) {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(Some(Ending::TimedOut));
            }
            host.wait(Some(deadline.map_or(start_at, |deadline| deadline.min(start_at))), None, Some(link))?;
            if link.take_stop()? {
                return Ok(Some(Ending::Stopped));
            }
        }
        Ok(None)
    }

    fn pid(&self) -> Option<Pid> {
        self.running.as_ref().map(|running| running.main.pid())
    }

    fn learn(&mut self, ending: Ending) {
        match ending {
            Ending::Accepted => (self.backoff, self.start_at) = (Duration::ZERO, None),
            // Neither shows that the process cannot work.
            Ending::Refused { .. } | Ending::Stopped => {}
            Ending::Exited(_) | Ending::Signaled(_) | Ending::TimedOut | Ending::BadAnswer => self.back_off(),
        }
    }

    /// A process without a file may exit by itself, for example to limit leaks.
    fn learn_between_files(&mut self, ended: Ending) {
        if ended != Ending::Exited(0) {
            self.learn(ended);
        }
    }

    fn back_off(&mut self) {
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.start_at = Some(Instant::now() + self.backoff);
    }
}
