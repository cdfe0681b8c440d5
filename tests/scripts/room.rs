//! Target folders in the cache: those of other checkouts stay untouched, and every build records which
//! checkout its folder belongs to.

use std::fs;
use std::path::Path;
use std::process::Command;

use tests::root;

fn room(cache: &Path, target: &Path) -> String {
    let script = root().join("tools/room.sh");
    let output = Command::new(script).arg(cache).arg(target).current_dir(root()).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    printed
}

#[test]
fn only_what_is_known_to_be_left_over_is_removed() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (cache, checkout) = (folder.path(), elsewhere.path().join("checkout"));
    let make = |name: &str, checkout: Option<&Path>| {
        fs::create_dir_all(cache.join(name)).unwrap();
        if let Some(checkout) = checkout {
            fs::write(cache.join(name).join("checkout"), format!("{}\n", checkout.display())).unwrap();
        }
    };
    fs::create_dir(&checkout).unwrap();
    fs::write(checkout.join("Makefile"), "").unwrap();
    let gone = elsewhere.path().join("gone");
    make("target-of-a-checkout", Some(&checkout));
    make("target-of-nobody-known", None);
    make("target-of-one-that-is-gone", Some(&gone));
    make("readme-of-one-that-is-gone", Some(&gone));
    make("seeding-target-x", None);
    make(".tmpnew", None);
    make(".tmpold", None);
    let aged = Command::new("touch").args(["-d", "2 days ago"]).arg(cache.join(".tmpold")).status();
    assert!(aged.unwrap().success());
    // A folder that already has a build needs no extra space.
    let own = cache.join("target-own");
    fs::create_dir_all(own.join("debug/deps")).unwrap();

    room(cache, &own);
    let left = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut left: Vec<String> = left.collect();
    left.sort();
    let kept = [".room.lock", ".tmpnew", "target-of-a-checkout", "target-of-nobody-known", "target-own"];
    assert_eq!(left, kept);
    let whose = fs::read_to_string(own.join("checkout")).unwrap();
    assert_eq!(Path::new(whose.trim()), fs::canonicalize(root()).unwrap());
}

/// A folder without a recorded checkout is never removed, so a target that forgot to record it would fill the
/// disk.
#[test]
fn every_target_that_builds_says_whose_folder_it_builds_in() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let builds = ["cargo build", "cargo test", "cargo clippy", "cargo bench", "$(TESTBED)", "$(call program"];
    let (mut rule, mut checked) = ("", 0);
    for line in makefile.lines() {
        if line.starts_with('\t') {
            if builds.iter().any(|build| line.contains(build)) {
                let prerequisites = rule.split("##").next().unwrap_or_default();
                assert!(prerequisites.split_whitespace().any(|word| word == "room"), "{rule}: {line}");
                checked += 1;
            }
        } else if line.contains(':') && !line.starts_with(['.', '#']) {
            rule = line;
        }
    }
    assert!(checked > 15, "{checked}");
}
