//! Runs one process of the filter at a time: starts it, waits for events, and leaves nothing of it behind.
//!
//! One thread and one poll notice every event at once; nothing sleeps and polls.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use nix::{poll::PollFlags, unistd::Pid};

use crate::{
    end::End,
    family::{Family, Main},
    feed::Feed,
    limit::{Due, Limit},
    link::Link,
    output::Output,
    poll::poll_until,
    program::Program,
    scratch::Scratch,
    signals::Signals,
    spawn::{Spawned, Spawner, Stdin},
    usage::{Meter, Usage},
    wire::{Done, Ending, KILL_TIMEOUT},
};

/// The longest that the next file waits for output, if a process that is not ours to kill keeps stdout open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) struct Host {
    pub(crate) signals: Signals,
    pub(crate) output: Output,
    pub(crate) meter: Meter,
    family: Family,
    spawner: Spawner,
    scratch: Scratch,
}

/// The filter's process and its inputs.
pub(crate) struct Running {
    pub(crate) main: Main,
    pub(crate) feed: Feed,
    /// Whether the process, or a descendant of it, is still to be reaped.
    has_processes: bool,
}

impl Host {
    pub(crate) fn new(program: Program, lines: bool, signals: Signals) -> Result<Self, End> {
        let spawner = Spawner::new(program).map_err(End::Unusable)?;
        let family = Family::adopt()?;
        let scratch = Scratch::new(family.has_own_container());
        Ok(Self { signals, output: Output::new(lines), meter: Meter::new(), family, spawner, scratch })
    }

    /// Starts the command.
    pub(crate) fn start(&mut self, stdin: Stdin) -> Result<Running, End> {
        let spawned = self.spawner.spawn(stdin, self.scratch.begin());
        let Spawned { pid, stdin, stdout, stderr } = spawned.map_err(End::Unusable)?;
        self.output.attach(stdout, stderr);
        Ok(Running { main: Main::of(pid), feed: Feed::new(stdin), has_processes: true })
    }

    /// Waits until the process has ended, an answer came, or its time is up; returns whether it was asked to
    /// end. [`Self::end`] deals with processes that are still alive.
    pub(crate) fn attend(
        &mut self,
        running: &mut Running,
        link: &mut Link,
        deadline: Option<Instant>,
    ) -> Result<Option<Ending>, End> {
        let mut limit = Limit::new(deadline);
        // Reap before anything is due: a process that has ended in time is not asked to end.
        while running.main.ending.is_none() && !self.output.is_answered() {
            let now = Instant::now();
            let mut due = Due::Nothing;
            while link.take_stop()? {
                due = limit.stop(now);
            }
            if due == Due::Nothing {
                due = limit.due(now);
            }
            match due {
                Due::Nothing => {}
                Due::Terminate => running.main.terminate(),
                Due::Kill => break,
            }
            self.wait(limit.next(), Some(&mut running.feed), Some(link))?;
            self.reap(running);
        }
        // The end of the file follows, and shares a write with the last output.
        self.output.hold();
        Ok(limit.ending())
    }

    /// Kills and reaps every process, takes the rest of their output, and removes their temporary files.
    /// Returns how the filter's own process ended.
    pub(crate) fn end(&mut self, mut running: Running) -> Result<Ending, End> {
        let give_up = Instant::now() + KILL_TIMEOUT;
        while running.has_processes && self.family.reap(&mut running.main) {
            if Instant::now() >= give_up {
                return Err(End::Broken(format!(
                    "processes of the filter still run {KILL_TIMEOUT:?} after SIGKILL"
                )));
            }
            self.family.kill();
            self.wait(Some(give_up), None, None)?;
        }
        self.drain()?;
        self.output.detach();
        self.scratch.wipe();
        // It is missing only if something else reaped the process, which nothing here does.
        Ok(running.main.ending.unwrap_or(Ending::Signaled(0)))
    }

    /// The report on a file that has ended. Without a text of its own, it has the last lines of the log.
    pub(crate) fn done(
        &mut self,
        ending: Ending,
        before: &Usage,
        kept: Option<Pid>,
        text: Option<String>,
    ) -> Done {
        let after = self.meter.read(kept);
        Done {
            ending,
            cpu: after.cpu_since(before),
            peak_memory_kib: after.peak_memory_kib(kept),
            oom_killed: after.oom_killed_since(before),
            after_term: self.signals.was_terminated(),
            text: text.unwrap_or_else(|| self.output.tail.last_lines()),
        }
    }

    /// Logs how the file ended: at once if the log takes it, so that it precedes later output.
    pub(crate) fn mark_end(&mut self, ending: Ending) -> Result<(), End> {
        self.output.end(ending);
        let ready = poll_until(self.output.interests(), Some(Instant::now()))?;
        self.output.advance(ready);
        Ok(())
    }

    /// Reaps processes whose end a wait has noticed.
    pub(crate) fn reap(&mut self, running: &mut Running) {
        if self.signals.take_child() {
            running.has_processes = self.family.reap(&mut running.main);
        }
    }

    /// Moves output until both streams have nothing more to read or write.
    pub(crate) fn drain(&mut self) -> Result<(), End> {
        let give_up = Instant::now() + DRAIN_TIMEOUT;
        while self.output.is_busy() && Instant::now() < give_up {
            self.wait(Some(give_up), None, None)?;
        }
        Ok(())
    }

    /// Moves the output that has already arrived.
    pub(crate) fn catch_up(&mut self, running: &mut Running) -> Result<(), End> {
        let give_up = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let has_moved = self.wait(Some(Instant::now()), Some(&mut running.feed), None)?;
            self.reap(running);
            if !has_moved || Instant::now() >= give_up {
                return Ok(());
            }
        }
    }

    /// Waits until something happens or the given moment comes, which may be in the past. Moves output and
    /// input meanwhile; returns whether output moved.
    pub(crate) fn wait(
        &mut self,
        until: Option<Instant>,
        mut feed: Option<&mut Feed>,
        link: Option<&mut Link>,
    ) -> Result<bool, End> {
        let begin_due = self.output.begin_due();
        let until = until.into_iter().chain(begin_due).min();
        let [stdout, stderr] = self.output.interests();
        let sources = [
            stdout,
            stderr,
            feed.as_ref().and_then(|feed| feed.interest()),
            link.as_ref().map(|link| (link.as_fd(), PollFlags::POLLIN)),
            Some((self.signals.as_fd(), PollFlags::POLLIN)),
        ];
        let [stdout, stderr, to_feed, from_link, signals] = poll_until(sources, until)?;
        self.output.advance([stdout, stderr]);
        if begin_due.is_some_and(|due| due <= Instant::now()) {
            self.output.mark_begin();
        }
        if to_feed && let Some(feed) = &mut feed {
            feed.advance();
        }
        if signals {
            self.signals.read();
        }
        if from_link && let Some(link) = link {
            link.receive()?;
        }
        Ok(stdout || stderr)
    }

    /// Kills everything and forgets it: nothing more is reported.
    pub(crate) fn abandon(&mut self, running: Option<Running>) {
        self.output.release();
        self.output.mark_begin();
        if let Some(Err(end)) = running.map(|running| self.end(running)) {
            eprintln!("shim: {end}");
        }
        let _ = self.drain();
    }
}
