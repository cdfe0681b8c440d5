//! What a `Lines` filter's answers, and the end of its process, mean for a file.

use crate::{answer::Answer, wire::Ending};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) ending: Ending,
    /// The filter's reason, or ours about its answer.
    pub(crate) reason: Option<String>,
}

impl Verdict {
    /// `ended` is how the process ended; it counts if the process did not answer.
    pub(crate) fn of(answers: &[Option<Answer>], ended: Ending) -> Self {
        match answers {
            // The worker takes an exit code of 0 for success, as is right where no answer is expected.
            [] if ended == Ending::Exited(0) => Ending::BadAnswer.into(),
            [] => ended.into(),
            [Some(Answer::Accepted)] => Ending::Accepted.into(),
            [Some(Answer::Refused { reason, retry })] => Self {
                ending: Ending::Refused { retry: *retry },
                reason: Some(reason.clone()).filter(|reason| !reason.is_empty()),
            },
            [None] => {
                bad_answer("the filter's answer is not `{\"ok\":true}` or `{\"ok\":false,\"reason\":\"…\"}`")
            }
            _ => bad_answer("the filter answered one file more than once"),
        }
    }
}

impl From<Ending> for Verdict {
    fn from(ending: Ending) -> Self {
        Self { ending, reason: None }
    }
}

fn bad_answer(reason: &str) -> Verdict {
    Verdict { ending: Ending::BadAnswer, reason: Some(reason.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: Ending = Ending::Signaled(9);

    #[test]
    fn the_answer_counts_more_than_the_end_of_the_process() {
        assert_eq!(Verdict::of(&[Some(Answer::Accepted)], KILLED).ending, Ending::Accepted);
        let refusal = Answer::Refused { reason: "no video".to_owned(), retry: false };
        let verdict = Verdict::of(&[Some(refusal)], KILLED);
        assert_eq!(verdict.ending, Ending::Refused { retry: false });
        assert_eq!(verdict.reason.as_deref(), Some("no video"));
        assert_eq!(Verdict::of(&[], KILLED), KILLED.into());
        assert_eq!(Verdict::of(&[], Ending::Exited(0)).ending, Ending::BadAnswer, "no answer is no success");
    }

    #[test]
    fn two_answers_are_none() {
        let twice = [Some(Answer::Accepted), Some(Answer::Accepted)];
        assert_eq!(Verdict::of(&twice, KILLED).ending, Ending::BadAnswer);
        assert_eq!(Verdict::of(&[None], KILLED).ending, Ending::BadAnswer);
    }
}
