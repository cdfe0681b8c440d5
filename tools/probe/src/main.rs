//! A filter that succeeds or fails on command; suites run it when the work itself does not matter.
//!
//! ```text
//! probe copy               copies the input to its output
//! probe fail-on-marker     copies, but fails on a file that contains "FAIL-HERE"
//! probe fail-times N       fails in the first N attempts of a file, then copies
//! probe sleep SECONDS      waits, then copies
//! probe exit CODE          ends with this code
//! probe eat-memory         allocates memory until it is killed
//! probe hide               copies into a folder that only its own user may enter
//! probe point-out          leaves a link to a file outside of its output
//! probe obey               runs the command in the first line of the file
//! ```

use std::{
    env,
    error::Error,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    process::ExitCode,
    thread,
    time::Duration,
};

const USAGE: &str = "probe copy | fail-on-marker | fail-times N | sleep SECONDS | exit CODE | eat-memory | hide | point-out | obey";
const MARKER: &[u8] = b"FAIL-HERE";

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    match run(&words.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("probe: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<ExitCode, Box<dyn Error>> {
    match words {
        ["copy"] => copy(),
        ["fail-on-marker"] => {
            let found = fs::read(input())?.windows(MARKER.len()).any(|window| window == MARKER);
            if found { Err("the file is marked to fail".into()) } else { copy() }
        }
        ["fail-times", times] => {
            let (times, attempt): (u32, u32) = (times.parse()?, attempt());
            if attempt <= times {
                Err(format!("attempt {attempt} of {times} that fail").into())
            } else {
                copy()
            }
        }
        ["sleep", seconds] => {
            thread::sleep(Duration::try_from_secs_f64(seconds.parse()?)?);
            copy()
        }
        ["exit", code] => Ok(ExitCode::from(code.parse::<u8>()?)),
        ["eat-memory"] => eat_memory(),
        ["hide"] => hide(),
        ["point-out"] => {
            symlink("/etc/passwd", output()?.join("link"))?;
            Ok(ExitCode::SUCCESS)
        }
        ["obey"] => {
            let text = String::from_utf8_lossy(&fs::read(input())?).into_owned();
            let words: Vec<&str> = text.lines().next().unwrap_or("copy").split_whitespace().collect();
            match words.as_slice() {
                [] => copy(),
                ["obey", ..] => Err("a file cannot say obey".into()),
                words => run(words),
            }
        }
        _ => Err(USAGE.into()),
    }
}

fn input() -> String {
    env::var("SOURCE_PATH").unwrap_or_else(|_| "/ws/input".to_owned())
}

fn output() -> Result<PathBuf, Box<dyn Error>> {
    let filter = env::var("OPENFILTER_FILTER").unwrap_or_else(|_| "probe".to_owned());
    let output = PathBuf::from(env::var("OUTPUT_PATH").unwrap_or_else(|_| format!("/ws/out/{filter}")));
    fs::create_dir_all(&output)?;
    Ok(output)
}

fn copy() -> Result<ExitCode, Box<dyn Error>> {
    let bytes = fs::copy(input(), output()?.join("copy"))?;
    println!("copied {bytes} bytes");
    Ok(ExitCode::SUCCESS)
}

fn hide() -> Result<ExitCode, Box<dyn Error>> {
    let folder = output()?.join("private");
    fs::create_dir(&folder)?;
    let copy = folder.join("copy");
    fs::copy(input(), &copy)?;
    for (path, mode) in [(copy, 0o600), (folder, 0o700)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The number of this attempt, counted from 1; without a counter it is the first.
fn attempt() -> u32 {
    let file = env::var("OPENFILTER_ATTEMPT_FILE").unwrap_or_else(|_| "/ws/input.attempt".to_owned());
    fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1)
}

fn eat_memory() -> Result<ExitCode, Box<dyn Error>> {
    let mut eaten: Vec<Vec<u8>> = Vec::new();
    loop {
        // Write to the memory, because untouched memory costs nothing. Allocate it in small pieces, because a
        // container that is killed in its first moment is not always reported as out of memory.
        eaten.push(vec![1; 1 << 20]);
        std::hint::black_box(&eaten);
        thread::sleep(Duration::from_millis(20));
    }
}
