//! Waiting for something to become true.

use std::time::{Duration, Instant};

use crate::{
    error::{Error, Result},
    paths::Paths,
};

/// Often enough that a test does not wait for the clock, rarely enough to leave the processor to the cluster.
const INTERVAL: Duration = Duration::from_millis(100);

/// Probes until the probe returns something. A failed probe is treated as transient and tried again, unless a
/// component has died, because that does not heal. The error contains the last failure and the folder of the
/// logs.
pub async fn eventually<T>(
    paths: &Paths,
    what: &str,
    timeout: Duration,
    mut probe: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + timeout;
    let mut last = "no check has finished".to_owned();
    loop {
        // A hanging probe, for example on a paused API server, is cut off too.
        let left = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, probe()).await {
            Ok(Ok(Some(found))) => return Ok(found),
            Ok(Ok(None)) => last = "it was not yet true at the last check".to_owned(),
            Ok(Err(error @ Error::Died { .. })) => return Err(error),
            Ok(Err(error)) => last = error.to_string(),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return Err(Error::Timeout { what: what.to_owned(), timeout, last, logs: paths.logs() });
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_condition_that_never_holds_names_itself_the_last_failure_and_the_logs() {
        let paths = Paths { root: "/somewhere".into() };
        let refuse = async || Err::<Option<()>, _>(Error::Refused("no such pod".to_owned()));
        let error = eventually(&paths, "the pod runs", Duration::from_millis(250), refuse).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the pod runs") && text.contains("no such pod"), "{text}");
        assert!(text.contains("/somewhere/.testbed/logs"), "{text}");
    }

    #[tokio::test]
    async fn a_condition_that_comes_to_hold_ends_the_wait() {
        let paths = Paths { root: "/somewhere".into() };
        let mut looks = 0;
        let third = async || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        };
        assert_eq!(eventually(&paths, "third time", Duration::from_secs(5), third).await.unwrap(), 3);
    }
}
