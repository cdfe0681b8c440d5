//! Runs one process of the filter at a time: starts it, waits for what happens, and leaves nothing of it behind.
//!
//! One thread and one poll: whatever happens is noticed at once, and nothing is polled for by sleeping.

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

/// A process that keeps stdout open without being ours to kill delays the next file by no more.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) struct Host {
    pub(crate) signals: Signals,
    pub(crate) output: Output,
    pub(crate) meter: Meter,
    family: Family,
    spawner: Spawner,
    scratch: Scratch,
}

/// The filter's process and what it was given.
pub(crate) struct Running {
    pub(crate) main: Main,
    pub(crate) feed: Feed,
    /// Whether it, or a process that came from it, is still to be reaped.
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

    /// Waits until the process has ended, an answer came, or its time is up; returns whether it was asked to end. What
    /// is still alive then is left to [`Self::end`].
    pub(crate) fn attend(
        &mut self,
        running: &mut Running,
        link: &mut Link,
        deadline: Option<Instant>,
    ) -> Result<Option<Ending>, End> {
        let mut limit = Limit::new(deadline);
        // Before anything is due: what has ended in time is not asked to.
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

    /// Kills and reaps every process, takes the rest of their output, and removes their temporary files. How the
    /// filter's own process ended.
    pub(crate) fn end(&mut self, mut running: Running) -> Result<Ending, End> {
        let give_up = Instant::now() + KILL_TIMEOUT;
        while running.has_processes && self.family.reap(&mut running.main) {
            if Instant::now() >= give_up {
                return Err(End::Broken(format!(
                    "processes of the filter run on {KILL_TIMEOUT:?} after SIGKILL"
                )));
            }
            self.family.kill();
            self.wait(Some(give_up), None, None)?;
        }
        self.drain()?;
        self.output.detach();
        self.scratch.wipe();
        // There is none only if it was reaped by someone else, which nothing here does.
        Ok(running.main.ending.unwrap_or(Ending::Signaled(0)))
    }

    /// What is to be said of a file that has ended. Without a text of its own these are the last lines of the log.
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

    /// Says in the log how the file ended: at once if the log takes it, so that it comes before what follows.
    pub(crate) fn mark_end(&mut self, ending: Ending) -> Result<(), End> {
        self.output.end(ending);
        let ready = poll_until(self.output.interests(), Some(Instant::now()))?;
        self.output.advance(ready);
        Ok(())
    }

    /// Reaps what has ended, as far as a wait has noticed.
    pub(crate) fn reap(&mut self, running: &mut Running) {
        if self.signals.take_child() {
            running.has_processes = self.family.reap(&mut running.main);
        }
    }

    /// Moves output until both ends have nothing more to give or to take.
    pub(crate) fn drain(&mut self) -> Result<(), End> {
        let give_up = Instant::now() + DRAIN_TIMEOUT;
        while self.output.is_busy() && Instant::now() < give_up {
            self.wait(Some(give_up), None, None)?;
        }
        Ok(())
    }

    /// Moves the output that is there already.
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

    /// Waits until something happens or a moment has come, which may be an earlier one. Output and input move along;
    /// returns whether output did.
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

    /// Kills everything and forgets it: there is no more to be reported.
    pub(crate) fn abandon(&mut self, running: Option<Running>) {
        self.output.release();
        self.output.mark_begin();
        if let Some(Err(end)) = running.map(|running| self.end(running)) {
            eprintln!("shim: {end}");
        }
        let _ = self.drain();
    }
}
