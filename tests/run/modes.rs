//! The table of scenarios: each becomes a test in every mode in which it makes sense.

/// Makes two tests of each scenario, one in each mode.
macro_rules! in_both_modes {
    ($($scenario:ident)+) => {
        mod pod_per_file {
            $(#[tokio::test]
            #[ignore = "needs the cluster"]
            async fn $scenario() {
                super::$scenario(crate::harness::Mode::PodPerFile).await;
            })+
        }
        mod warm {
            $(#[tokio::test]
            #[ignore = "needs the cluster"]
            async fn $scenario() {
                super::$scenario(crate::harness::Mode::Warm).await;
            })+
        }
    };
}
