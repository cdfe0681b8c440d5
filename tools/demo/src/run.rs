//! One run: started, followed to its end, and reported.

use std::{
    io::{self, IsTerminal, Write},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crds::v1alpha1::{Counts, Phase, PipelineRun};

use crate::{
    Result,
    deploy::DEMO_NAMESPACE,
    kubectl::Kubectl,
    pace::Pace,
    progress::{View, render},
};

/// Often enough to look alive.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Less often in a log file, where lines are not redrawn.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// A file takes seconds here. If nothing has changed for this long, nothing will.
const STALLED: Duration = Duration::from_secs(180);
/// The width to assume if it cannot be determined.
const WIDTH: usize = 100;

/// A finished run.
pub struct Finished {
    /// Its last known state.
    pub run: PipelineRun,
    /// How fast it was.
    pub pace: Pace,
}

impl Finished {
    /// The name that the API server generated.
    pub fn name(&self) -> &str {
        self.run.metadata.name.as_deref().unwrap_or_default()
    }
}

/// Creates a run, follows it to its end, and shows how it ended. It must succeed with these numbers of files.
pub fn run_to_its_end(kubectl: &Kubectl, manifest: &str, succeeded: i64, failed: i64) -> Result<Finished> {
    let name = create(kubectl, manifest)?;
    let finished = follow(kubectl, &name)?;
    kubectl.show(&["get", "pipelinerun", "-n", DEMO_NAMESPACE, &name])?;
    tell_outcome(&finished.run, succeeded, failed)?;
    Ok(finished)
}

/// Removes unfinished runs of an interrupted demo, which would continue to write results.
pub fn remove_unfinished(kubectl: &Kubectl) -> Result<()> {
    let columns = "jsonpath={range .items[*]}{.metadata.name}={.status.phase}{\"\\n\"}{end}";
    let found = kubectl.ask(&["get", "pipelineruns", "-n", DEMO_NAMESPACE, "-o", columns])?;
    for (name, phase) in found.lines().filter_map(|line| line.split_once('=')) {
        if phase != "Succeeded" && phase != "Failed" {
            println!("An earlier demo was interrupted; its run is removed.");
            kubectl.show(&["delete", "pipelinerun", "-n", DEMO_NAMESPACE, name])?;
        }
    }
    Ok(())
}

/// Creates a run; returns the name that the API server generated.
fn create(kubectl: &Kubectl, manifest: &str) -> Result<String> {
    let printed = kubectl.show(&["create", "-f", manifest])?;
    Ok(name_of(&printed)
        .ok_or_else(|| format!("kubectl did not say what it created: {printed:?}"))?
        .to_owned())
}

/// `pipelinerun.filter.plainsight.ai/demo-x created`
fn name_of(printed: &str) -> Option<&str> {
    printed.split_once('/')?.1.split_whitespace().next()
}

/// Shows the progress of a run until it is over.
fn follow(kubectl: &Kubectl, name: &str) -> Result<Finished> {
    let started = Instant::now();
    let mut screen = Screen::new();
    let mut pace = Pace::default();
    let (mut last, mut changed) = (View::default(), Instant::now());
    loop {
        // The API server of a small machine may be busy, so retry until nothing has changed for too long.
        if let Ok(run) = look(kubectl, name) {
            let elapsed = started.elapsed();
            pace.look(elapsed, &counts(&run));
            let view = View::of(&run, elapsed, pace.files_per_second());
            if (view.phase, view.counts, view.listed) != (last.phase, last.counts, last.listed) {
                changed = Instant::now();
            }
            screen.show(&view, trouble(&run).as_deref());
            last = view;
            if view.is_finished() {
                screen.end();
                return Ok(Finished { run, pace });
            }
        }
        if changed.elapsed() > STALLED {
            screen.end();
            let _ = kubectl.show(&["describe", "pipelinerun", "-n", DEMO_NAMESPACE, name]);
            let _ = kubectl.show(&["get", "pods", "-n", DEMO_NAMESPACE]);
            return Err(format!("the run {name} has made no progress for {} s", STALLED.as_secs()).into());
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

fn look(kubectl: &Kubectl, name: &str) -> Result<PipelineRun> {
    let found = kubectl.ask(&["get", "pipelinerun", "-n", DEMO_NAMESPACE, name, "-o", "json"])?;
    Ok(serde_json::from_str(&found)?)
}

fn counts(run: &PipelineRun) -> Counts {
    run.status.as_ref().and_then(|status| status.counts).unwrap_or_default()
}

/// What blocks the run, according to its condition.
fn trouble(run: &PipelineRun) -> Option<String> {
    let conditions = &run.status.as_ref()?.conditions;
    let degraded = conditions.iter().find(|found| found.type_ == "Degraded" && found.status == "True")?;
    Some(format!("{}: {}", degraded.reason, degraded.message))
}

/// Reports how the run ended; returns an error if a demo should not end that way.
fn tell_outcome(run: &PipelineRun, succeeded: i64, failed: i64) -> Result<()> {
    let status = run.status.clone().unwrap_or_default();
    let (phase, counts) = (status.phase.unwrap_or_default(), counts(run));
    let ending = status.conditions.iter().find(|condition| condition.type_ == "Succeeded");
    let (reason, message) = ending.map_or(("", ""), |ending| (&ending.reason, &ending.message));
    println!("\n{phase} ({reason}): {message}");
    println!("in {}", status.duration.unwrap_or_default());
    if !status.recent_failures.is_empty() {
        println!("\nDead letters, from status.recentFailures of the run:");
    }
    for failure in &status.recent_failures {
        println!("  {}, attempts: {}", failure.file, failure.attempts);
        println!("    {}", failure.reason);
    }
    if (phase, counts.succeeded, counts.failed) == (Phase::Succeeded, succeeded, failed) {
        return Ok(());
    }
    Err(format!("the run should have succeeded, with {succeeded} files succeeded and {failed} failed").into())
}

/// Shows the progress: redrawn on a terminal, line by line elsewhere.
struct Screen {
    terminal: bool,
    shown: Option<(View, Instant)>,
    trouble: Option<String>,
}

impl Screen {
    fn new() -> Self {
        Self { terminal: io::stdout().is_terminal(), shown: None, trouble: None }
    }

    fn show(&mut self, view: &View, trouble: Option<&str>) {
        if trouble.is_some() && trouble != self.trouble.as_deref() {
            self.clear();
            println!("{}", trouble.unwrap_or_default());
        }
        self.trouble = trouble.map(str::to_owned);
        if self.terminal {
            self.clear();
            print!("{}", render(view, terminal_width()));
            let _ = io::stdout().flush();
        } else if is_due(self.shown.as_ref().map(|(last, when)| (last, when.elapsed())), view) {
            println!("{}", render(view, WIDTH));
            self.shown = Some((*view, Instant::now()));
        }
    }

    fn clear(&self) {
        if self.terminal {
            print!("\r\x1b[2K");
        }
    }

    fn end(&self) {
        if self.terminal {
            println!();
        }
    }
}

/// Whether to write a new line into a log: at the beginning, at the end, and sometimes in between.
fn is_due(last: Option<(&View, Duration)>, now: &View) -> bool {
    let Some((last, ago)) = last else { return true };
    let is_new = (last.phase, last.counts, last.listed) != (now.phase, now.counts, now.listed);
    is_new && (ago >= LINE_INTERVAL || now.is_finished())
}

/// The width of the terminal less one column, because many terminals wrap after the last one.
fn terminal_width() -> usize {
    let asked = Command::new("stty").arg("size").stdin(Stdio::inherit()).stderr(Stdio::null()).output();
    let printed =
        asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let columns = printed.split_whitespace().nth(1).and_then(|columns| columns.parse::<usize>().ok());
    columns.filter(|columns| *columns > 0).map_or(WIDTH, |columns| columns - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_new_run_is_what_kubectl_says() {
        assert_eq!(name_of("pipelinerun.filter.plainsight.ai/demo-x7k2p created\n"), Some("demo-x7k2p"));
        assert_eq!(name_of("error"), None);
    }

    #[test]
    fn a_log_has_a_line_when_something_changed_but_not_too_often() {
        let counts =
            |succeeded| Counts { total_files: 9, queued: 9 - succeeded, succeeded, ..Counts::default() };
        let view = |phase, succeeded| View { phase, counts: counts(succeeded), ..View::default() };
        let (then, now) = (view(Phase::Running, 3), view(Phase::Running, 4));
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(5));
        assert!(is_due(None, &now));
        assert!(is_due(Some((&then, long)), &now));
        assert!(!is_due(Some((&then, short)), &now));
        assert!(!is_due(Some((&now, long)), &now), "nothing new");
        assert!(is_due(Some((&then, short)), &view(Phase::Succeeded, 9)), "the end is always told");
    }
}
