//! `make demo` as a person would run it: on the testbed, and then on an existing cluster that still holds
//! everything the first demo left.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use testbed::{Paths, Testbed, services::S3_IP_URL};

/// How long the demo may take once everything is built.
const WITH_CACHES_WITHIN: Duration = Duration::from_secs(180);

/// Runs the demo with these variables; returns its output and how long it took.
fn demo(words: &[&str], variables: &[(&str, &str)]) -> (String, Duration) {
    let started = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    let output = command.args(words).envs(variables.iter().copied()).output().unwrap();
    let took = started.elapsed();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}\n{}", text(&output.stderr));
    println!("{printed}");
    (printed, took)
}

/// The contact sheets that the demo leaves: the pictures, and the tiles of one of them.
fn sheets() -> [PathBuf; 2] {
    ["contact-sheet.png", "warm-sheet.png"].map(|name| Paths::find().unwrap().state().join("demo").join(name))
}

fn remove_sheets() {
    sheets().iter().for_each(|sheet| std::fs::remove_file(sheet).unwrap());
}

/// Checks what every demo prints and draws.
fn check(printed: &str) {
    let has = |words: &str| assert!(printed.contains(words), "{words:?} is not in:\n{printed}");
    has("37/37  36 done, 1 failed, 0 running, 0 queued");
    has("Succeeded (Completed)");
    has("camera/north/IMG_2019.jpg, attempts: 2");
    has("thumbnail exited with code 1");
    // The rejection, with both mistakes and their corrections.
    has("denied the request");
    has("[run-prefix]");
    has("[glob]");
    has("36 files below s3://");
    has("make demo DOWN=1");
    assert!(!printed.contains('\u{1b}'), "not a terminal, so no control characters:\n{printed}");
    check_warm(printed);
    let [pictures, tiles] = sheets().map(|sheet| image::open(sheet).unwrap().into_rgb8());
    // Six columns of 272 and rows of 236 pixels, 20 apart, below a title of 84.
    assert_eq!(pictures.dimensions(), (20 + 6 * 292, 84 + 6 * 256));
    // Eight columns of 96 and ten rows of 92 pixels, 4 apart.
    assert_eq!(tiles.dimensions(), (4 + 8 * 100, 84 + 10 * 96));
    // Fewer colours are enough for the tiles, which all belong to one picture.
    for (sheet, least) in [(pictures, 10_000), (tiles, 1_000)] {
        let colours: std::collections::BTreeSet<_> = sheet.pixels().map(|pixel| pixel.0).collect();
        assert!(colours.len() > least, "the sheet has {} colours", colours.len());
    }
}

/// All tiles succeed, and the compared rate is the final rate of the progress line.
fn check_warm(printed: &str) {
    let line_with = |words: &str| {
        let found = printed.lines().rfind(|line| line.contains(words));
        assert!(found.is_some(), "{words:?} is not in:\n{printed}");
        found.unwrap()
    };
    let progress = line_with("2000/2000  2000 done, 0 failed, 0 running, 0 queued");
    line_with("2000 files below s3://");
    let sentence = line_with(" times as fast as a pod per file");
    let after = |words: &str| sentence.split_once(words).unwrap().1.split_whitespace().next().unwrap();
    let [times, warm, slow] = ["Warm was ", "same filters: ", "instead of "].map(after);
    assert!(progress.contains(&format!("  {warm} files/s")), "{progress}\n{sentence}");
    let [times, warm, slow] = [times, warm, slow].map(|number| number.parse::<f64>().unwrap());
    // All three are rounded.
    assert!((times - warm / slow).abs() <= 0.5 + times * 0.05, "{sentence}");
    assert!(times > 10.0, "{sentence}");
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn the_demo_runs_again_and_elsewhere() {
    let (printed, first) = demo(&[], &[]);
    check(&printed);
    println!("with whatever was built before it took {first:.0?}");
    remove_sheets();

    // The testbed in the role of a user's cluster: its images are where another cluster's registry would be.
    let testbed = Testbed::start_or_reuse().await.unwrap();
    let services = testbed.services().await.unwrap();
    let paths = testbed.paths();
    let path = format!("{}:{}", paths.state().join("bin").display(), std::env::var("PATH").unwrap());
    let config = paths.kubeconfig().display().to_string();
    let valkey = testbed::images::reference("valkey");
    let (access, secret) = services.s3.keys();
    let own = [
        ("DEMO_CLUSTER", "current"),
        ("KUBECONFIG", &config),
        ("PATH", &path),
        ("DEMO_REGISTRY", "localhost/openfilter"),
        ("DEMO_TAG", "testbed"),
        ("DEMO_VALKEY_IMAGE", &valkey),
        ("DEMO_S3_ENDPOINT", S3_IP_URL),
        ("DEMO_S3_ACCESS_KEY", access),
        ("DEMO_S3_SECRET_KEY", secret),
        ("DEMO_S3_BUCKET", "elsewhere"),
    ];
    let (printed, second) = demo(&[], &own);
    check(&printed);
    println!("with everything built, and cluster and deployment there, it took {second:.0?}");
    assert!(second < WITH_CACHES_WITHIN, "{second:.0?}: people wait for it");
    assert!(printed.contains("36 files below s3://elsewhere/results/"), "{printed}");
    demo(&["--down"], &own);
    let namespaces = Command::new(paths.bin("kubectl"))
        .args(["get", "namespaces", "-o", "name"])
        .env("KUBECONFIG", &config)
        .output()
        .unwrap();
    let namespaces = String::from_utf8_lossy(&namespaces.stdout).into_owned();
    assert!(namespaces.contains("kube-system") && !namespaces.contains("openfilter"), "{namespaces}");
}
